"""The drafts of one call for several slots, token by token, and the slots that still need drafts."""

from collections.abc import Sequence

from onward.worker.speculation.proposer import DraftRequest


class DraftRound:
    def __init__(self, draft_requests: Sequence[DraftRequest], max_model_len: int) -> None:
        self.draft_requests = {draft_request.slot: draft_request for draft_request in draft_requests}
        self.drafts: dict[int, list[int]] = {draft_request.slot: [] for draft_request in draft_requests}
        self._max_model_len = max_model_len
        self._active: dict[int, None] = {}

    def add(self, slot: int, token: int | None) -> None:
        """Adds the next draft of a slot; None if its logits are not numbers. No draft follows an end token, or the last
        position of the context."""
        self._active.pop(slot, None)
        if token is None:
            return
        draft_request, drafts = self.draft_requests[slot], self.drafts[slot]
        assert len(drafts) < draft_request.num_drafts, "a request gets at most as many drafts as it asks for"
        drafts.append(token)
        max_drafts = min(draft_request.num_drafts, self._max_model_len - draft_request.num_tokens)
        if len(drafts) < max_drafts and token not in draft_request.sampling.end_token_ids:
            self._active[slot] = None

    @property
    def active_slots(self) -> list[int]:
        """Slots that need another draft after their last one."""
        return list(self._active)
