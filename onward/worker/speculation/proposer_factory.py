"""From what `--speculative` says to whom it means. A kind's own modules are imported only where it is wanted."""

from onward.config import WorkerConfig
from onward.proto.speculative_config import parse_speculative
from onward.worker.speculation.proposer import ProposerFactory


def create_proposer_factory(config: WorkerConfig) -> ProposerFactory | None:
    """None where nobody drafts."""
    if config.speculative is None:
        return None
    said = parse_speculative(config.speculative)
    match said.kind:
        case "ngram":
            from onward.worker.speculation.ngram_proposer import NgramProposerFactory

            return NgramProposerFactory()
        case "draft":
            from onward.worker.speculation.draft_opening import create_draft_model_factory

            return create_draft_model_factory(said.path, config)
        case "eagle":
            from onward.worker.speculation.eagle_proposer import create_eagle_factory

            return create_eagle_factory(said.path, config)
