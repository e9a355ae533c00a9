"""The drafts of one call for several slots, token by token, and who goes on."""

from collections.abc import Sequence

from onward.worker.speculation.proposer import DraftRequest


class DraftRound:
    def __init__(self, wishes: Sequence[DraftRequest], max_model_len: int) -> None:
        self.wishes = {wish.slot: wish for wish in wishes}
        self.drafts: dict[int, list[int]] = {wish.slot: [] for wish in wishes}
        self._max_model_len = max_model_len
        self._going: dict[int, None] = {}

    def add(self, slot: int, token: int | None) -> None:
        """The next draft of a slot, or None, where the logits were not numbers. Nothing is drafted behind an end of the
        output, nor behind the last place of a context."""
        self._going.pop(slot, None)
        if token is None:
            return
        wish, drafts = self.wishes[slot], self.drafts[slot]
        assert len(drafts) < wish.num_drafts, "a request gets at most as many drafts as it asks for"
        drafts.append(token)
        most = min(wish.num_drafts, self._max_model_len - wish.num_tokens)
        if len(drafts) < most and token not in wish.sampling.end_token_ids:
            self._going[slot] = None

    @property
    def active_slots(self) -> list[int]:
        """Slots that want a token behind their last one."""
        return list(self._going)
