import json
import random
from typing import Any

import pytest

from onward.errors import InvalidRequest
from onward.web import body_parts
from onward.web.body_parts import MAX_PARTS, check_parts, num_parts


def known_parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + known_parts(one) for one in value.values())
    return 1 + sum(map(known_parts, value)) if isinstance(value, list) else 0


def any_value(chance: random.Random, depth: int = 0) -> Any:
    text = "".join(chance.choices('a"\\[]{}:,é\n\u2028', k=chance.randrange(12)))
    kind = chance.randrange(4) if depth < 4 else 3
    if kind == 0:
        return [any_value(chance, depth + 1) for _ in range(chance.randrange(5))]
    if kind == 1:
        return {f"{text}{number}": any_value(chance, depth + 1) for number in range(chance.randrange(5))}
    return text if kind == 3 else chance.randrange(1000)


@pytest.mark.parametrize("slice_bytes", [1, 2, 7, 1 << 20])
def test_parts_outside_strings_are_counted_wherever_a_body_is_cut(
    slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_parts, "SLICE_BYTES", slice_bytes)
    chance = random.Random(7)
    for _ in range(300):
        value = any_value(chance)
        for is_ascii in (True, False):
            assert num_parts(json.dumps(value, ensure_ascii=is_ascii).encode()) == known_parts(value)


@pytest.mark.parametrize("part", ["[]", "{}", '{"a": 1}', "[[[[]]]]"])
def test_a_body_of_very_many_small_parts_is_refused(part: str) -> None:
    with pytest.raises(InvalidRequest, match="the body: has more than 131072 lists"):
        check_parts(f'{{"tools": [{",".join([part] * MAX_PARTS)}]}}'.encode())


def test_texts_and_lists_of_tokens_of_any_length_pass() -> None:
    check_parts(json.dumps({"prompt": '[{"a": "b"}]\\' * MAX_PARTS}).encode())
    check_parts(json.dumps({"prompt": list(range(8 * MAX_PARTS))}).encode())
    check_parts(json.dumps({"messages": [{"role": "user", "content": "{}: []"}] * (MAX_PARTS // 4)}).encode())
