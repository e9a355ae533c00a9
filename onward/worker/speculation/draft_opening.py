"""A model that drafts, from its path to the proposer: found and prepared like any other, and held against the served one.

It is quantized to int8 wherever its sizes allow that: a loss makes drafts a little worse, and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.models.decoder import check_supported
from onward.models.layers.paged_kv import kv_dtype
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.proto.model import PreparedModel
from onward.text.tokenizer import Tokenizer
from onward.worker import kv_pool
from onward.worker.speculation import draft_cost
from onward.worker.speculation.draft_model_proposer import DraftModelProposer
from onward.worker.speculation.proposer import ProposerContext


class DraftModelProposerFactory:
    def __init__(self, model: PreparedModel, weights: Mapping[str, Any], config: WorkerConfig, path: str) -> None:
        """`path` is the flag's value."""
        self._model, self._weights, self._path = model, weights, path
        self._block_size = config.block_size
        self._draft_cost = 0.0

    @property
    def bytes_per_block(self) -> int:
        dtype = kv_dtype(self._model.config, self._model.quantization)
        return kv_pool.block_bytes(self._model.config, dtype, self._block_size)

    @property
    def draft_cost(self) -> float:
        """Known once it is open."""
        return self._draft_cost

    def create(self, context: ProposerContext) -> DraftModelProposer:
        if difference := vocabulary_difference(self._model, context.model):
            raise StartupError(
                f"--speculative draft:{self._path}: {difference}; a model that drafts must have the served one's vocabulary"
            )
        self._draft_cost = draft_cost.of_model(self._model.config, context.model.config)
        return DraftModelProposer(self._model, self._weights, context)


def create_draft_model_factory(path: str, config: WorkerConfig) -> DraftModelProposerFactory:
    try:
        model = _prepare(path)
        return DraftModelProposerFactory(model, open_weights(model), config, path)
    except StartupError as error:
        raise StartupError(f"--speculative draft:{path}: {error.message}") from None


def _prepare(path: str) -> PreparedModel:
    try:
        model = prepare(path, quantization="int8")
        check_supported(model.config, model.quantization)
        return model
    except StartupError as first:
        try:
            return prepare(path, quantization="none")
        except StartupError:
            raise first from None


def vocabulary_difference(draft: PreparedModel, served: PreparedModel) -> str | None:
    """Between the two vocabularies. Where both have a tokenizer, sizes do not matter: models of a family are padded, and
    given further special tokens, as somebody liked."""
    if draft.tokenizer is None or served.tokenizer is None:
        ours, theirs = draft.config.vocab_size, served.config.vocab_size
        return None if ours == theirs else f"its vocabulary has {ours} tokens, the served model's {theirs}"
    files = [Path(model.folder) / name for model, name in ((draft, draft.tokenizer), (served, served.tokenizer))]
    if files[0] == files[1]:
        return None
    ours, theirs = (Tokenizer.from_file(file).table.token_bytes_list for file in files)
    for token_id, (draft_token, served_token) in enumerate(zip(ours, theirs, strict=False)):
        if draft_token != served_token:
            return f"token {token_id} is {draft_token!r} to it, and {served_token!r} to the served model"
    return None
