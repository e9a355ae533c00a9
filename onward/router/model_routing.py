"""Model selection: the names that clients may request, routes, and the share of each version.

A model here is the name that an instance announces as its own (`Registration.model`); instances with the same model
are interchangeable. A client may request a model by this name, by an alias, or by a route (`--route
"m=m-v1:0.9,m-v2:0.1"`), whose versions are models. A canary is a version with a small share. The version depends on
the request id alone, so that every router with the same routes chooses the same one, and a simulation can be
repeated. This module takes the time; it knows no sockets.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from onward.errors import InvalidRequest, StartupError
from onward.proto.cursor import model_tag
from onward.proto.router import MAX_MODEL_NAME_CHARS, MAX_MODEL_NAMES
from onward.router.client_stream import ClientRequest, ClientStream
from onward.router.instance_registry import InstanceRegistry, InstanceState
from onward.web.json_body import short_repr
from onward.web.openai_api.model_names import model_not_found

Routes = Mapping[str, Mapping[str, float]]
"""By the name that clients ask for, the share of each version."""

MAX_ROUTES = 64
SHARE_TOLERANCE = 1e-6
_ALIVE_STATES = (InstanceState.READY, InstanceState.RESTARTING)


def parse_routes(values: Sequence[str]) -> Routes:
    """Parses the values of `--route`. Raises a `StartupError` that names the invalid one and the reason."""
    routes: dict[str, Mapping[str, float]] = {}
    if len(values) > MAX_ROUTES:
        raise StartupError(f"--route is given {len(values)} times, more than {MAX_ROUTES}")
    for value in values:
        name, equals, versions = value.partition("=")
        name = name.strip()
        if not equals:
            raise StartupError(f"--route {value!r} has no '=': write NAME=MODEL:SHARE,MODEL:SHARE")
        _check_name(value, name, "the name before '='")
        if name in routes:
            raise StartupError(f"--route {value!r}: {name!r} has a route already")
        routes[name] = _parse_shares(value, versions)
    return routes


def _parse_shares(route: str, text: str) -> Mapping[str, float]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_MODEL_NAMES:
        raise StartupError(f"--route {route!r} has {len(parts)} models, more than {MAX_MODEL_NAMES}")
    shares: dict[str, float] = {}
    for part in parts:
        # From the right: a model's name may have a colon, as the tags of some registries do.
        model, colon, share_text = part.rpartition(":")
        if not colon and len(parts) == 1:
            model, share_text = part, "1"
        elif not colon:
            raise StartupError(f"--route {route!r}: {part!r} has no share; write {part or 'MODEL'}:0.1")
        _check_name(route, model, "a model")
        if model in shares:
            raise StartupError(f"--route {route!r} names {model!r} twice")
        shares[model] = _parse_share(route, model, share_text)
    total = math.fsum(shares.values())
    if abs(total - 1) > SHARE_TOLERANCE:
        raise StartupError(f"--route {route!r}: the shares add up to {total:g}, not to 1")
    return shares


def _check_name(route: str, name: str, what: str) -> None:
    if not name:
        raise StartupError(f"--route {route!r}: {what} is empty")
    if len(name) > MAX_MODEL_NAME_CHARS or not name.isprintable():
        raise StartupError(f"--route {route!r}: {what} has more than {MAX_MODEL_NAME_CHARS} printable characters")


def _parse_share(route: str, model: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise StartupError(f"--route {route!r}: the share {text!r} of {model!r} is not a number") from None
    if not 0 <= share <= 1:
        raise StartupError(f"--route {route!r}: the share {text} of {model!r} is not within 0 to 1")
    return share


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that the registered instances serve."""

    aliases: Mapping[str, AbstractSet[str]]
    """Aliases of each known model: models of registered instances, and of instances that were registered recently."""
    routes: Routes

    def names(self) -> list[str]:
        """Returns all names that a client may ask for, sorted: models, aliases and routes."""
        found = {*self.aliases, *self.routes}
        return sorted(found.union(*self.aliases.values()))

    def shares_of(self, name: str) -> Mapping[str, float]:
        """Returns the share of each version that serves requests for this name; empty if the name is not served. A
        route wins over a model of the same name, and a model over an alias. An alias of several models stands for equal
        shares of them."""
        if name in self.routes:
            return self.routes[name]
        if name in self.aliases:
            return {name: 1.0}
        aliased = self._models_with_alias(name)
        return {model: 1 / len(aliased) for model in aliased}

    def pinned_version(self, name: str, tag: str) -> str | None:
        """Returns the version of a stream whose client already has tokens: the model with this tag or, without a tag,
        with this name. Returns None if the model is not known now."""
        if tag:
            known = {*self.aliases, *(version for shares in self.routes.values() for version in shares)}
            return next((model for model in sorted(known) if model_tag(model) == tag), None)
        if self.is_model(name):
            return name
        aliased = self._models_with_alias(name)
        return aliased[0] if len(aliased) == 1 else None

    def is_model(self, name: str) -> bool:
        """Returns whether this is the name of a model, not only of an alias or a route. A route's name counts if one of
        the route's versions has the same name."""
        return name in self.aliases or name in self.routes.get(name, {})

    def models_of_record(self, name: str, tag: str) -> AbstractSet[str]:
        """Returns the models that may have generated the tokens of a stored record, or an empty set if none is known
        now. This is the model with `tag` or, without a tag, the model called `name`. If there is no such model, these
        are all models with the alias `name`."""
        pinned = self.pinned_version(name, tag)
        return set(self._models_with_alias(name)) if pinned is None else {pinned}

    def _models_with_alias(self, name: str) -> list[str]:
        return sorted(model for model, aliases in self.aliases.items() if name in aliases)

    def only_model(self) -> str:
        """Returns the model for a request that names none; empty if no model is known. Raises `InvalidRequest` if
        several models are served."""
        if len(self.aliases) > 1:
            shown = ", ".join(map(short_repr, self.names()[:MAX_MODEL_NAMES]))
            raise InvalidRequest(f"model: is required, since several are served here: {shown}", param="model")
        return next(iter(self.aliases), "")


def choose_version(shares: Mapping[str, float], request_id: str, alive: AbstractSet[str]) -> str:
    """Returns the version for a request id, by the shares. If no instance of that version is alive, chooses among the
    versions that are alive and have a share. If none is alive, returns the first choice."""
    chosen = _weighted_choice(shares, request_id)
    if chosen in alive:
        return chosen
    others = {version: share for version, share in shares.items() if version in alive and share > 0}
    return _weighted_choice(others, request_id) if others else chosen


def _weighted_choice(shares: Mapping[str, float], request_id: str) -> str:
    """Chooses by a hash of the request id, which is spread evenly even if a client has chosen the ids."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    point = int.from_bytes(digest, "little") / 2**64 * math.fsum(shares.values())
    candidates = [(version, share) for version, share in shares.items() if share > 0]
    for version, share in candidates:
        point -= share
        if point < 0:
            return version
    return candidates[-1][0]


class ModelSelector:
    """Chooses the model of each request and stream from those that the router's instances serve."""

    def __init__(self, routes: Routes, instances: InstanceRegistry, settled_at_s: float) -> None:
        """`settled_at_s`: from this time on, every running instance counts as registered. Before it, a request for an
        unknown model waits instead of failing."""
        self.routes = routes
        self.settled_at_s = settled_at_s
        self._instances = instances

    def served(self) -> ServedModels:
        return ServedModels(self._instances.known_models(), self.routes)

    def for_stream(self, stream: ClientStream, now_s: float) -> str | None:
        """Returns the model for the stream's next attempt; None if it is not known yet. Once the client has tokens,
        this is the model that generated them, even if it has no instance now. Raises if the model is not served."""
        if stream.is_model_fixed:
            return stream.model or self._pinned_version(stream.request, now_s)
        if stream.model and not stream.request.model:
            return stream.model  # chosen while it was the only one
        return self.for_request(stream.request, now_s)

    def for_request(self, client_request: ClientRequest, now_s: float) -> str | None:
        """Returns the model for a request that has no stream yet; None if it is not known yet. Tokens that the client
        already has stay with the model that generated them. Raises if the model is not served."""
        if client_request.skip_to:
            return self._pinned_version(client_request, now_s)
        if client_request.generated_token_ids and self.served().is_model(client_request.model):
            # Another version of a route of this name must not continue the tokens.
            return client_request.model
        return self.for_name(client_request.model, client_request.request_id, now_s)

    def _pinned_version(self, client_request: ClientRequest, now_s: float) -> str | None:
        """Returns the model of the tokens that the client has. Raises if neither this model nor another one of the
        request's name is served."""
        if not client_request.model and not client_request.model_tag:
            return self.for_name("", client_request.request_id, now_s)
        pinned = self.served().pinned_version(client_request.model, client_request.model_tag)
        if pinned is None:
            self.for_name(client_request.model, client_request.request_id, now_s)
        return pinned

    def for_name(self, name: str, request_id: str, now_s: float) -> str | None:
        """Returns the model for a request that names `name` and has no tokens yet. None: not known yet, so the stream
        waits. Raises if the name is not served."""
        served = self.served()
        if not name:
            # Until every instance has registered, a second model may appear.
            return None if now_s < self.settled_at_s else served.only_model() or None
        shares = served.shares_of(name)
        if shares:
            return choose_version(shares, request_id, self._alive(now_s))
        if not served.aliases or now_s < self.settled_at_s:
            return None
        raise model_not_found(name, served.names())

    def _alive(self, now_s: float) -> set[str]:
        """Models with an instance that takes requests, or will in a moment."""
        return {
            instance.model
            for instance in self._instances.list_instances(now_s)
            if instance.role != "prefill" and instance.state in _ALIVE_STATES
        }
