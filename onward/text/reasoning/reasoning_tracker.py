"""Whether an output is inside its thinking, and which token must come next so that it ends within its budget.

A function of the tokens so far: built by replaying them, advanced with each new one. So it is the same after a
preemption, a crash, or on another machine. Knows token ids only; what they say is decided where the rule is made.

    budget 3, lead (.), end (</think>)       <think>  a  b  c  .  </think>  answer …
                                                      └─ 3 ─┘  └─ forced ┘
"""

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from onward.proto.reasoning_params import ReasoningParams

START_WINDOW = 8
"""Number of tokens within which thinking may begin. A later tag is ordinary text."""


class ReasoningPhase(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    BEHIND = "behind"


class ReasoningTracker:
    __slots__ = ("_end", "_num_read", "_params", "_start", "answer_position", "num_tokens", "phase")

    def __init__(self, params: ReasoningParams, token_ids: Iterable[int] = ()) -> None:
        self.phase = ReasoningPhase.INSIDE if params.starts_in_reasoning else ReasoningPhase.BEFORE
        self.num_tokens = 0
        """Reasoning tokens, without those of a complete end tag."""
        self.answer_position: int | None = None if params.starts_in_reasoning else 0
        """The position of the answer's first token. None while the thinking goes on."""
        self._params = params
        self._num_read = 0
        self._start = _SequenceMatcher(params.begin_token_ids)
        self._end = _SequenceMatcher(params.end_token_ids)
        for token_id in token_ids:
            self.advance(token_id)

    @property
    def is_inside(self) -> bool:
        """Thinking is not the answer: no grammar applies to it."""
        return self.phase is ReasoningPhase.INSIDE

    @property
    def begin_token_ids(self) -> tuple[int, ...]:
        """Token ids that would begin the reasoning, as long as it may begin."""
        return self._params.begin_token_ids if self.phase is ReasoningPhase.BEFORE else ()

    @property
    def is_at_start(self) -> bool:
        return not self._num_read

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may come next. None: the model chooses."""
        budget = self._params.budget
        if self.phase is not ReasoningPhase.INSIDE or budget is None or self.num_tokens < budget:
            return None
        # A tag that has begun is finished; else the lead comes, then the tag. At most that many tokens are forced.
        if self._end.num_matched:
            return self._params.end_token_ids[self._end.num_matched]
        num_over = self.num_tokens - budget
        prefix = self._params.forced_prefix_token_ids
        return prefix[num_over] if num_over < len(prefix) else self._params.end_token_ids[0]

    def advance(self, token_id: int) -> None:
        self._num_read += 1
        match self.phase:
            case ReasoningPhase.BEFORE:
                self._look_for_start(token_id)
            case ReasoningPhase.INSIDE:
                self.num_tokens += 1
                if self._end.advance(token_id):
                    self.num_tokens -= len(self._params.end_token_ids)
                    self.phase, self.answer_position = ReasoningPhase.BEHIND, self._num_read
            case ReasoningPhase.BEHIND:
                pass

    def _look_for_start(self, token_id: int) -> None:
        if self._start.advance(token_id):
            self.phase, self.answer_position = ReasoningPhase.INSIDE, None
        elif self._num_read >= START_WINDOW and not self._start.num_matched:
            self.phase = ReasoningPhase.BEHIND


def thinking_state(token_ids: Sequence[int], params: ReasoningParams) -> ReasoningTracker:
    """Returns a tracker that has read these tokens."""
    return ReasoningTracker(params, token_ids)


def find_forbidden_forced_token(params: ReasoningParams, end_token_ids: Collection[int], min_tokens: int) -> int | None:
    """Returns a token that the budget may force at a position where `min_tokens` forbids it as an end of the output, or
    None if there is none. At such a position no token would be left to choose.

    budget 2, lead (.), end (</think>), min_tokens 4      a  b  .  </think>     forced at 2 and 3, and no end before 4
    """
    if params.budget is None:
        return None
    first_position = params.budget + (0 if params.starts_in_reasoning else len(params.begin_token_ids))
    prefix, end = params.forced_prefix_token_ids, params.end_token_ids
    # The model may have begun the tag by itself when the budget is used up: then its rest is forced without the lead.
    forced_positions = [(token_id, first_position + index) for index, token_id in enumerate((*prefix, end[0]))] + [
        (token_id, first_position) for token_id in end[1:]
    ]
    return next(
        (token_id for token_id, position in forced_positions if position < min_tokens and token_id in end_token_ids),
        None,
    )


class _SequenceMatcher:
    """How much of a token sequence the newest tokens are: Knuth, Morris and Pratt's machine."""

    __slots__ = ("_fallbacks", "_wanted", "num_matched")

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.num_matched = 0
        self._wanted = wanted
        self._fallbacks = _fallbacks(wanted)

    def advance(self, token_id: int) -> bool:
        """Reads one more token, and returns whether it completes the sequence."""
        while self.num_matched and self._wanted[self.num_matched] != token_id:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        if self._wanted[self.num_matched] == token_id:
            self.num_matched += 1
        if self.num_matched < len(self._wanted):
            return False
        self.num_matched = 0
        return True


def _fallbacks(wanted: tuple[int, ...]) -> list[int]:
    """Returns, for each beginning of the sequence, the length of its longest shorter beginning that is also its end."""
    lengths = [0] * len(wanted)
    for index in range(1, len(wanted)):
        length = lengths[index - 1]
        while length and wanted[length] != wanted[index]:
            length = lengths[length - 1]
        lengths[index] = length + (wanted[length] == wanted[index])
    return lengths
