import pytest

from onward.errors import InvalidRequest
from onward.text.prompt_tokenizer import OPEN_MARK, add_marker, cut_at_marker


@pytest.mark.parametrize("content", ["so ", [{"type": "text", "text": "a"}, {"type": "text", "text": "so "}]])
def test_the_prompt_is_what_comes_before_the_mark(content: object) -> None:
    first = {"role": "user", "content": "hi"}
    marked = add_marker([first, {"role": "assistant", "content": content}])
    assert marked[0] is first
    last = marked[-1]["content"]
    assert (last if isinstance(last, str) else last[-1]["text"]) == "so " + OPEN_MARK
    assert cut_at_marker(f"<hi><so {OPEN_MARK}>") == "<hi><so ", "the text's own spaces stay"
    assert cut_at_marker(f"<{OPEN_MARK}><so {OPEN_MARK}>") == f"<{OPEN_MARK}><so ", (
        "the last one is ours, whatever a client has sent"
    )


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": []}], [{"content": [{"type": "image_url"}]}]]
)
def test_without_a_last_text_there_is_nothing_to_leave_open(messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidRequest, match="no last message"):
        add_marker(messages)


def test_a_template_that_does_not_show_it_is_named() -> None:
    with pytest.raises(InvalidRequest, match="does not show"):
        cut_at_marker("nothing")
