"""From an assignment to its grammar and its thinking, as far as its tokens have led.

Both are rebuilt from the whole list, so they are where the last slot of this request left off.
"""

from pathlib import Path

from onward.grammar.grammars import Grammars
from onward.grammar.lazy import LazyGrammars
from onward.proto.model import PreparedModel
from onward.proto.step import Assign
from onward.text.reasoning.thinking_tokens import Thinking, forbidden_end
from onward.text.tokenizer import Tokenizer
from onward.worker.mask_making import MaskMaking
from onward.worker.slot_checks import Fault
from onward.worker.slot_grammar import SlotGrammar


def grammars_of(model: PreparedModel) -> LazyGrammars:
    """Of the model's vocabulary."""

    def build() -> Grammars:
        assert model.tokenizer is not None, "who has none is refused before"
        return Grammars(Tokenizer.from_file(Path(model.folder) / model.tokenizer))

    return LazyGrammars(build)


def thinking_of(assign: Assign) -> Thinking | None:
    rule, sampling = assign.sampling.thinking, assign.sampling
    if rule is None:
        return None
    # The api refuses such a request. Without this, one that came by another way would be blamed on the model's logits.
    if (token_id := forbidden_end(rule, sampling.end_token_ids, sampling.min_tokens)) is not None:
        problem = f"token {token_id} has to end the thinking, and min_tokens ({sampling.min_tokens}) forbids it"
        raise Fault("invalid_request", problem)
    return Thinking(rule, assign.token_ids[assign.num_prompt :])


def grammar_of(
    assign: Assign, thinking: Thinking | None, model: PreparedModel, grammars: LazyGrammars, masks: MaskMaking
) -> SlotGrammar | None:
    """About what is answer and not thinking; another thread rebuilds it."""
    grammar = assign.sampling.grammar
    if grammar is None:
        return None
    if model.tokenizer is None:
        raise Fault("invalid_request", "this model has no tokenizer, so nothing can be said about its text")
    begin = 0 if thinking is None else thinking.answer_from
    answer = [] if begin is None else assign.token_ids[assign.num_prompt + begin :]
    return SlotGrammar(grammar, answer, grammars, masks)
