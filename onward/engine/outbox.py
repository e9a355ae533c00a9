"""Messages of the engine to its api processes. The deltas of one step are sent as one message for each api process.

Results of prompts that are computed for peers are kept separately, since no api process waits for them.
"""

from dataclasses import dataclass

from onward.engine.request import Request
from onward.proto.engine import ErrorInfo, FromEngine, TokenDelta, TokenDeltas
from onward.proto.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PeerPrefillResult:
    """The token of a peer's prompt, or why there is none."""

    request: Request
    token_ids: list[int]
    error: ErrorInfo | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    grammar_done: bool
    draft_token_ids: list[int]


class ApiOutbox:
    def __init__(self) -> None:
        self._peer_prefill_results: list[PeerPrefillResult] = []
        self._messages: list[tuple[str, FromEngine]] = []
        self._deltas: dict[str, list[TokenDelta]] = {}
        self._summaries: list[tuple[str, FromEngine]] = []

    def send(self, api_id: str, message: FromEngine) -> None:
        self._messages.append((api_id, message))

    def send_after_deltas(self, api_id: str, message: FromEngine) -> None:
        """Goes out behind the deltas: it describes the state after them."""
        self._summaries.append((api_id, message))

    def add_delta(
        self,
        request: Request,
        token_ids: list[int],
        error: ErrorInfo | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        embedding: bytes | None = None,
        *,
        grammar_done: bool = False,
        num_drafted: int = 0,
        draft_token_ids: list[int] | None = None,
    ) -> None:
        """Publishes the newest tokens of a request, and its end if it has ended. Comes before it is forgotten."""
        reason = request.finish_reason
        request.num_sent_tokens = request.num_generated
        request.finish_sent = reason is not None
        if request.handoff is not None:
            drafts = draft_token_ids or []
            result = PeerPrefillResult(request, token_ids, error, logprobs, prompt_logprobs, grammar_done, drafts)
            self._peer_prefill_results.append(result)
            return
        rescored = None
        if request.score_from is not None and prompt_logprobs is not None:
            # |- of the prompt: from score_from to num_prompt -|- of the given output: the rest -|
            num_prompt_rows = max(0, request.num_prompt - request.score_from)
            prompt_logprobs, rescored = prompt_logprobs[:num_prompt_rows] or None, prompt_logprobs[num_prompt_rows:]
        self._deltas.setdefault(request.api_id, []).append(
            TokenDelta(
                request.spec.request_id,
                request.spec.epoch,
                request.num_generated - len(token_ids),
                token_ids,
                request.num_prompt,
                request.num_cached_tokens or 0,
                reason.value if reason else None,
                error,
                logprobs,
                prompt_logprobs,
                rescored,
                embedding,
                num_drafted,
            )
        )

    def take_peer_prefill_results(self) -> list[PeerPrefillResult]:
        results, self._peer_prefill_results = self._peer_prefill_results, []
        return results

    def take_messages(self, step: int) -> list[tuple[str, FromEngine]]:
        deltas = [(api_id, TokenDeltas(step, deltas)) for api_id, deltas in self._deltas.items()]
        messages = self._messages + deltas + self._summaries
        self._messages, self._deltas, self._summaries = [], {}, []
        return messages
