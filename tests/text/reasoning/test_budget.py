import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from onward.proto.reasoning_params import ReasoningParams
from onward.text.reasoning.prompt_state import make_reasoning_params, starts_in_reasoning
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS
from onward.text.tokenizer import Tokenizer as OurTokenizer


def tokenizer_with(tags: list[str], *, special: bool) -> OurTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    return OurTokenizer(json.dumps(json.loads(plain.to_str())))


def test_a_rule_names_the_tags_tokens_and_the_lead() -> None:
    tokenizer = tokenizer_with(["<think>", "</think>"], special=False)
    rule = make_reasoning_params(REASONING_FORMATS["qwen3"], tokenizer, starts_inside=True, budget=5)
    line_break = tokenizer.encode("\n")
    assert rule == ReasoningParams((256,), (257,), True, 5, tuple(line_break))


def test_tags_that_are_no_tokens_cannot_be_followed() -> None:
    assert (
        make_reasoning_params(
            REASONING_FORMATS["mistral"], tokenizer_with([], special=True), starts_inside=False, budget=5
        )
        is None
    )


def test_the_prompts_last_tokens_say_whether_thinking_is_open_also_where_tags_are_special() -> None:
    tokenizer = tokenizer_with(["[THINK]", "[/THINK]"], special=True)
    assert starts_in_reasoning(
        REASONING_FORMATS["mistral"], tokenizer, tokenizer.encode("a long enough question[THINK]")
    )
    assert not starts_in_reasoning(REASONING_FORMATS["mistral"], tokenizer, tokenizer.encode("[THINK]so[/THINK]"))
