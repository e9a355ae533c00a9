"""The served models in Ollama's form, made from the model cards of `/v1/models`. Pure functions.

A card of an instance of an earlier version has no `meta`; its model is shown without what only that says.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from onward.web.ollama_api.ollama_answers import rfc3339
from onward.web.openai_api.model_names import model_not_found

FORMAT = "safetensors"
_NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded."""


def find_card(cards: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    for card in cards:
        if card["id"] == name:
            return card
    raise model_not_found(name, [card["id"] for card in cards])


def tags_body(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"models": [_listed(card) | {"modified_at": _modified_at(card)} for card in cards]}


def ps_body(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the loaded models, which are all."""
    models = [_listed(card) | {"expires_at": _NEVER, "context_length": card["max_model_len"]} for card in cards]
    return {"models": models}


def show_body(card: dict[str, Any]) -> dict[str, Any]:
    meta, details = _meta(card), _details(card)
    family = details["family"]
    model_info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": card["id"],
        f"{family}.context_length": card["max_model_len"],
    }
    if "hidden_size" in meta:
        model_info[f"{family}.embedding_length"] = meta["hidden_size"]
    return {
        # Neither of these exists here; the model's chat template is not shown.
        **dict.fromkeys(("license", "modelfile", "parameters", "template"), ""),
        "details": details,
        "model_info": model_info,
        "capabilities": meta.get("capabilities", ["completion"]),
        "modified_at": _modified_at(card),
    }


def _listed(card: dict[str, Any]) -> dict[str, Any]:
    meta = _meta(card)
    return {
        "name": card["id"],
        "model": card["id"],
        "size": meta.get("size", 0),
        "digest": hashlib.sha256(str(meta.get("fingerprint", card["id"])).encode()).hexdigest(),
        "details": _details(card),
    }


def _details(card: dict[str, Any]) -> dict[str, Any]:
    family = _meta(card).get("architecture", "")
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _meta(card).get("precision", ""),
    }


def _modified_at(card: dict[str, Any]) -> str:
    return rfc3339(card["created"])


def _meta(card: dict[str, Any]) -> dict[str, Any]:
    meta = card.get("meta")
    return meta if isinstance(meta, dict) else {}
