from onward.web.body import compact


def test_a_body_without_whitespace_is_held_once() -> None:
    body = b'{"prompt":"a b","max_tokens":1}'
    assert compact(body) is body
    assert compact(b' {"prompt": "a b", "max_tokens": 1}\n') == body


def test_bytes_that_are_no_json_stay_as_they_are() -> None:
    assert compact(b'{"prompt": ') == b'{"prompt": '
