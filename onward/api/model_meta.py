"""What a model's card says beside OpenAI's fields: architecture, size, precision, and what its answers may contain."""

from pathlib import Path
from typing import Any

from onward.api.requests.text_processor import TextProcessor
from onward.proto.model import PreparedModel


def model_meta(model: PreparedModel, text_processor: TextProcessor) -> dict[str, Any]:
    capabilities = ["completion"]
    if model.chat_template:
        capabilities.append("tools")
    if text_processor.message_parsers.reasoning is not None:
        capabilities.append("thinking")
    return {
        "architecture": model.config.architecture,
        "hidden_size": model.config.hidden_size,
        "precision": model.precision,
        "fingerprint": model.fingerprint,
        "size": _size_of_weights(model),
        "capabilities": capabilities,
    }


def _size_of_weights(model: PreparedModel) -> int:
    """Returns the bytes of the weights' files; 0 if they cannot be read."""
    try:
        return sum((Path(model.folder) / name).stat().st_size for name in model.weights)
    except OSError:
        return 0
