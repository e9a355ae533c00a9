"""Deliberate bugs about reasoning and tool calls, and the tests that notice each."""

from collections.abc import Callable

from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.proto.step import AssignSlot
from onward.text.message_events import MessageEvent
from onward.text.parsed_text_stream import ParsedTextStream
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker import model_runner
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.constraints import ConstrainedSlot
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from tests.sabotage.patches import Patches, Sabotage

CUTS = "tests/api/test_cut_messages.py::"
WORKER = "tests/worker/test_thinking.py::"


def _think_anew(patch: Patches) -> None:
    def thinking(assign: AssignSlot) -> ReasoningTracker | None:
        rule = assign.sampling_params.reasoning
        return None if rule is None else ReasoningTracker(rule)

    patch.put(model_runner, "create_thinking", thinking)


def _let_it_think_on(patch: Patches) -> None:
    patch.put(ReasoningTracker, "forced_token_id", None)


def _bind_thoughts(patch: Patches) -> None:
    def in_force(original: Callable, slot: ConstrainedSlot) -> SlotGrammar | None:
        return slot.grammar

    patch.around(constraints, "active_grammar", in_force)


def _tell_again(patch: Patches) -> None:
    replayed: list[ChoiceOutput] = []

    def push_again(original: Callable, self: ChoiceOutput, start: ChoiceStart) -> tuple[list[int], str]:
        replayed.append(self)
        told = original(self, start)
        replayed.clear()
        return told

    def take(original: Callable, self: ParsedTextStream) -> list[MessageEvent]:
        return [] if replayed else original(self)

    patch.around(ChoiceOutput, "_replay_tokens", push_again)
    patch.around(ParsedTextStream, "take_events", take)


TABLE = [
    Sabotage(
        "reasoning-starts-over",
        "an output that was interrupted starts its reasoning over",
        _think_anew,
        [WORKER + "test_an_output_that_is_gone_on_with_anywhere_is_the_same"],
    ),
    Sabotage(
        "budget-ignored",
        "reasoning goes on beyond its budget",
        _let_it_think_on,
        [WORKER + "test_thinking_ends_within_its_budget_whatever_else_is_forbidden"],
    ),
    Sabotage(
        "grammar-of-reasoning",
        "a grammar is applied to the reasoning before the answer",
        _bind_thoughts,
        [WORKER + "test_a_grammar_is_about_what_comes_behind_the_thinking"],
    ),
    Sabotage(
        "message-events-twice",
        "message events that an earlier attempt has sent are sent again",
        _tell_again,
        [CUTS + "test_another_instance_goes_on_for_a_router"],
    ),
]
