from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.errors import InvalidRequest
from onward.web.template_sandbox import MAX_TEMPLATE_CHARS, TemplateSandbox
from onward.web.template_sandbox_child import RenderJob

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Héllo"}]
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ALIASES = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}\
{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
HOSTILE = {
    "a loop over a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "a long repetition": "{{ 'x' * 10**9 }}",
    "a repetition that is no operator": "{{ 'x'|center(10**10) }}",
    "more memory than it may have": "{{ 'x'|center(700000000)|length }}",
    "a wide format": "{{ '%99999999999d' % 1 }}",
    "a power tower": "{{ 10**(10**10) }}",
    "text that doubles": DOUBLING + "{{ ns.x }}",
    "lists that hold each other": ALIASES + "{{ ns.a == ns.b }}",
    "their text": ALIASES + "{{ ns.a }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "too much output": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "broken": "{% if %}",
}


@pytest.fixture(scope="module")
def jail() -> Iterator[TemplateSandbox]:
    jail = TemplateSandbox()
    yield jail
    jail.close()


def test_a_clients_template_makes_the_prompt(jail: TemplateSandbox) -> None:
    job = RenderJob(
        "{{ bos_token }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}{{ x }}{{ strftime_now('%Y') }}",
        MESSAGES,
        created_s=0.0,
        bos_token="<s>",
        variables={"x": [1]},
    )
    assert jail.render(job) == '<s>"Héllo"[1]1970'


@pytest.mark.parametrize("source", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_template_is_refused_and_harms_nobody_after_it(jail: TemplateSandbox, source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        jail.render(RenderJob(source, MESSAGES, created_s=0.0))
    assert refused.value.param == "chat_template"
    assert jail.render(RenderJob("{{ messages[0].content }}", MESSAGES, created_s=0.0)) == "Héllo"


def test_a_template_has_a_length(jail: TemplateSandbox) -> None:
    assert jail.render(RenderJob("x" * MAX_TEMPLATE_CHARS, [], created_s=0.0)) == "x" * MAX_TEMPLATE_CHARS
    with pytest.raises(InvalidRequest, match="longer than"):
        jail.render(RenderJob("x" * (MAX_TEMPLATE_CHARS + 1), [], created_s=0.0))


def test_the_process_that_renders_has_no_environment_and_no_open_files(jail: TemplateSandbox) -> None:
    assert jail.render(RenderJob("", [], created_s=0.0)) == ""
    child = jail._child
    assert child is not None
    environment = Path(f"/proc/{child.pid}/environ").read_text()
    assert {entry.partition("=")[0] for entry in environment.split("\0") if entry} == {"PYTHONPATH"}


def test_a_renderer_that_dies_is_replaced() -> None:
    jail = TemplateSandbox()
    try:
        assert jail.render(RenderJob("a", [], created_s=0.0)) == "a"
        assert jail._child is not None
        jail._child.kill()
        jail._child.wait()
        assert jail.render(RenderJob("b", [], created_s=0.0)) == "b"
    finally:
        jail.close()
