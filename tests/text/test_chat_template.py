from typing import Any

import pytest

from onward.errors import InvalidRequest, StartupError
from onward.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, created_s: float = 0.0, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, created_s=created_s, **options)


def test_messages_become_a_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_text_parts_are_one_text_and_no_content_is_none() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert (
        render(source, [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "[one\ntwo][]"
    )


@pytest.mark.parametrize("content", [7, {"text": "x"}, ["x"], [{"type": "image_url"}], [{"type": "text", "text": 3}]])
def test_content_of_another_kind_is_refused_by_message(content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content") as refused:
        render(CHATML, [*HELLO, {"role": "user", "content": content}])
    assert refused.value.param == "messages"


def test_a_template_without_a_developer_role_gets_a_system_message() -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


def test_tool_messages_and_names_reach_the_template() -> None:
    messages = [{"role": "tool", "content": "42", "name": "add", "tool_call_id": "call_1"}]
    source = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }} {{ m.content }}{% endfor %}"
    assert render(source, messages) == "tool add call_1 42"


def test_special_tokens_tools_and_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ tools[0].name }}{{ enable_thinking }}"
    assert render(source, tools=[{"name": "f"}], variables={"enable_thinking": False}) == "<s></s>fFalse"
    assert ChatTemplate("{{ bos_token is defined }}").render(HELLO, created_s=0) == "False"


def test_the_clock_is_the_requests() -> None:
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert render(source, created_s=1_700_000_000) == "14 Nov 2023 22:13"


def test_json_is_written_for_models_and_not_for_html() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "u", "content": "<é> & 'x'"}]) == (
        '{"role": "u", "content": "<é> & \'x\'"}'
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'


def test_blocks_leave_no_lines_of_their_own() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "hello\n"


def test_loops_can_be_left_and_generation_marks_are_transparent() -> None:
    leave = "{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}"
    source = "{% for i in range(9) %}" + leave + "{{ i }}{% endfor %}"
    assert render(source) == "02"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahellob"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "append"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ missing.attribute }}", "missing"),
    ],
)
def test_what_the_template_refuses_is_the_clients_fault(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(source)
    assert refused.value.param == "messages"
    assert reason in refused.value.message


@pytest.mark.parametrize("source", ["{% if %}", "{{ [1, 2] | random }}"])
def test_a_template_that_is_broken_or_draws_lots_cannot_be_served(source: str) -> None:
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate(source)


def test_chance_is_not_within_reach() -> None:
    assert render("{{ lipsum is defined }}") == "False"


def test_a_prompt_has_a_bound() -> None:
    source = "{% for i in range(100) %}{{ messages[0].content }}{% endfor %}"
    assert len(ChatTemplate(source, max_chars=500).render(HELLO, created_s=0)) == 500
    with pytest.raises(InvalidRequest, match="499 characters"):
        ChatTemplate(source, max_chars=499).render(HELLO, created_s=0)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for a in [[[]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{{ messages[0].content * 10**9 }}",
        "{{ 10**(10**9) }}",
    ],
)
def test_a_template_that_would_not_end_is_ended(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(source)
    assert refused.value.param == "messages"


def test_steps_are_counted_to_the_bound() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, max_steps=3).render(HELLO * 3, created_s=0) == "hello" * 3
    with pytest.raises(InvalidRequest, match="too many steps"):
        ChatTemplate(source, max_steps=2).render(HELLO * 3, created_s=0)


def test_a_counted_loop_knows_its_length_and_its_neighbours() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }} {% endfor %}"
    assert render(source, messages=HELLO * 2) == "1/2False{'role': 'user', 'content': 'hello'} 2/2True "


def test_small_products_and_powers_are_as_ever() -> None:
    assert render("{{ 'ab' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 3 * [0] }}") == "ababab610243.0[0, 0, 0]"


def test_variables_cannot_reach_the_counter() -> None:
    with pytest.raises(InvalidRequest, match="too many steps"):
        ChatTemplate("{% for m in [1, 2, 3] %}{% endfor %}", max_steps=2).render(
            HELLO, created_s=0, variables={"_steps": None}
        )
