"""Creates the proposer factory that `--speculative` selects. Each kind's modules are imported only when it is selected."""

from onward.config import WorkerConfig
from onward.proto.speculative_config import parse_speculative
from onward.worker.speculation.proposer import ProposerFactory


def create_proposer_factory(config: WorkerConfig) -> ProposerFactory | None:
    """Returns the factory; None without `--speculative`."""
    if config.speculative is None:
        return None
    speculative = parse_speculative(config.speculative)
    match speculative.kind:
        case "ngram":
            from onward.worker.speculation.ngram_proposer import NgramProposerFactory

            return NgramProposerFactory()
        case "draft":
            from onward.worker.speculation.draft_model_proposer import create_draft_model_factory

            return create_draft_model_factory(speculative.path, config)
        case "eagle":
            from onward.worker.speculation.eagle_proposer import create_eagle_factory

            return create_eagle_factory(speculative.path, config)
