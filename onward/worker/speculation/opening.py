"""From what `--speculative` says to whom it means. A kind's own modules are imported only where it is wanted."""

from onward.config import WorkerConfig
from onward.proto.speculation import read_speculation
from onward.worker.speculation.proposer import ProposerOpening


def new_opening(config: WorkerConfig) -> ProposerOpening | None:
    """None where nobody drafts."""
    if config.speculative is None:
        return None
    said = read_speculation(config.speculative)
    match said.kind:
        case "ngram":
            from onward.worker.speculation.ngram import NgramOpening

            return NgramOpening()
        case "draft":
            from onward.worker.speculation.draft_opening import open_draft

            return open_draft(said.path, config)
        case "eagle":
            from onward.worker.speculation.eagle import open_eagle

            return open_eagle(said.path, config)
