"""Creates the grammar and the reasoning tracker of an assignment.

Both are rebuilt from the whole token list, so they continue where the last slot of this request ended.
"""

from pathlib import Path

from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.model import PreparedModel
from onward.proto.step import AssignSlot
from onward.text.reasoning.reasoning_tracker import ReasoningTracker, find_forbidden_forced_token
from onward.text.tokenizer import Tokenizer
from onward.worker.logits_processors.mask_executor import MaskExecutor
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from onward.worker.slot_checks import SlotError


def create_grammar_compiler(model: PreparedModel) -> LazyGrammarCompiler:
    """Returns a compiler for the model's vocabulary, which is created on first use."""

    def build() -> GrammarCompiler:
        assert model.tokenizer is not None, "a model without a tokenizer gets no grammar"
        return GrammarCompiler(Tokenizer.from_file(Path(model.folder) / model.tokenizer))

    return LazyGrammarCompiler(build)


def create_thinking(assign: AssignSlot) -> ReasoningTracker | None:
    reasoning, sampling = assign.sampling_params.reasoning, assign.sampling_params
    if reasoning is None:
        return None
    # The api process refuses such a request. Without this check, one that came by another way would fail with an error
    # about the model's logits.
    if (token_id := find_forbidden_forced_token(reasoning, sampling.end_token_ids, sampling.min_tokens)) is not None:
        message = f"token {token_id} has to end the thinking, and min_tokens ({sampling.min_tokens}) forbids it"
        raise SlotError("invalid_request", message)
    return ReasoningTracker(reasoning, assign.token_ids[assign.num_prompt :])


def create_slot_grammar(
    assign: AssignSlot,
    thinking: ReasoningTracker | None,
    model: PreparedModel,
    compiler: LazyGrammarCompiler,
    mask_executor: MaskExecutor,
) -> SlotGrammar | None:
    """Returns the grammar of the answer, without the reasoning tokens before it. Another thread rebuilds its state."""
    grammar = assign.sampling_params.grammar
    if grammar is None:
        return None
    if model.tokenizer is None:
        raise SlotError("invalid_request", "this model has no tokenizer, so nothing can be said about its text")
    answer_start = 0 if thinking is None else thinking.answer_position
    answer_token_ids = [] if answer_start is None else assign.token_ids[assign.num_prompt + answer_start :]
    return SlotGrammar(grammar, answer_token_ids, compiler, mask_executor)
