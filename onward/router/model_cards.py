"""Merges the model cards of all instances into one list, and their API descriptions into one. Pure functions."""

from collections.abc import Iterable, Sequence
from typing import Any

from onward.router.model_routing import Routes

MODELS_PATH = "/v1/models"


def merge_model_cards(documents: Iterable[Any], routes: Routes) -> list[dict[str, Any]]:
    """Returns the cards of several answers to `/v1/models`, each name once, and a card for each route that leads to one
    of these models. A route's card has the smallest context length of its versions. Skips everything that is not a
    model card."""
    cards: dict[str, dict[str, Any]] = {}
    for document in documents:
        data = document.get("data") if isinstance(document, dict) else None
        for card in data if isinstance(data, list) else []:
            is_card = isinstance(card, dict) and isinstance(card.get("id"), str)
            # A model's own name comes before an alias of another one.
            if is_card and (card["id"] not in cards or card.get("root") == card["id"]):
                cards[card["id"]] = card
    models = {card["id"]: card for card in cards.values() if card.get("root", card["id"]) == card["id"]}
    for name, shares in routes.items():
        versions = [models[version] for version, share in shares.items() if version in models and share > 0]
        if versions:
            lengths = [
                version["max_model_len"] for version in versions if isinstance(version.get("max_model_len"), int)
            ]
            cards[name] = versions[0] | {"id": name} | ({"max_model_len": min(lengths)} if lengths else {})
    return [cards[name] for name in sorted(cards)]


def with_model_names(document: Any, names: Sequence[str]) -> Any:
    """Changes an instance's `/openapi.json` in place, so that each `model` with a list of values lists `names`. Returns
    it."""
    schemas = document.get("components", {}).get("schemas", {}) if isinstance(document, dict) else {}
    for schema in schemas.values():
        model = schema.get("properties", {}).get("model", {})
        if "enum" in model:
            model["enum"] = list(names)
    return document
