import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.text.message_events import ContentText, MessageEvent, ReasoningText
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS, detect_reasoning_format
from tests.text.cutting import check_any_cutting, cuts, told

every_format = pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
_scraps = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<",
    "</",
    "<th",
    "[",
    "\n",
    " ",
    "Hm",
    "so",
    "é",
    "<think",
    "/",
]
texts = st.lists(st.sampled_from(_scraps), max_size=8).map("".join) | st.text(max_size=20)
words = st.text(alphabet="ab <\n", max_size=8)


def parts(events: list[MessageEvent]) -> tuple[str, str]:
    """Thoughts and words."""
    thoughts = "".join(event.text for event in events if isinstance(event, ReasoningText))
    return thoughts, "".join(event.text for event in events if isinstance(event, ContentText))


def read(name: str, text: str, begins_inside: bool = False) -> tuple[str, str]:
    return parts(told(REASONING_FORMATS[name].parser(begins_inside), [text]))


@every_format
@settings(max_examples=150, deadline=None)
@given(text=texts, begins_inside=st.booleans(), places=cuts)
def test_however_a_text_is_cut_its_thoughts_are_the_same_and_nothing_is_lost(
    name: str, text: str, begins_inside: bool, places: list[int]
) -> None:
    check_any_cutting(lambda: REASONING_FORMATS[name].parser(begins_inside), text, places)


@every_format
@settings(max_examples=60, deadline=None)
@given(thoughts=words, answer=words, begins_inside=st.booleans(), blanks=st.sampled_from(["", "\n", "\n\n"]))
def test_thoughts_are_between_the_tags_and_words_behind_them(
    name: str, thoughts: str, answer: str, begins_inside: bool, blanks: str
) -> None:
    form = REASONING_FORMATS[name]
    opened = "" if begins_inside else form.begin + blanks
    text = f"{opened}{thoughts}{form.end}{blanks}{answer}"
    assert read(name, text, begins_inside) == (thoughts.lstrip(" \n"), answer.lstrip(" \n"))


def test_a_tag_that_the_prompt_has_opened_may_come_once_more() -> None:
    assert read("deepseek_r1", "<think>\nhm</think>yes", begins_inside=True) == ("hm", "yes")


def test_a_tag_behind_the_first_word_is_a_word() -> None:
    text = "Write <think> first, then </think>."
    assert read("qwen3", text) == ("", text)
    assert read("qwen3", f"<think>a</think>{text}") == ("a", text)


def test_thinking_that_does_not_end_is_all_thoughts() -> None:
    assert read("think", "<think>hm, let me see </thi") == ("hm, let me see </thi", "")


@pytest.mark.parametrize(
    ("name", "prompt_end", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST]", False),
        ("mistral", "[/INST][THINK]", True),
    ],
)
def test_the_prompts_end_says_whether_thinking_is_open(name: str, prompt_end: str, is_open: bool) -> None:
    assert REASONING_FORMATS[name].output_starts_inside(prompt_end) == is_open


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<｜Assistant｜>{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("[THINK]{{ thoughts }}[/THINK]", "mistral"),
    ],
)
def test_a_template_says_how_its_model_thinks(template: str, name: str | None) -> None:
    assert detect_reasoning_format(template) == name
