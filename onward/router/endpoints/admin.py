"""Routes about the router itself, and those by which instances join it."""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward import log
from onward.errors import RETRY_SOON_S, ClientError, InvalidRequest, OnwardError, Unavailable
from onward.obs.metrics import Registry
from onward.proto.router import SIGNATURE_HEADER, Registration, RegistrationReply
from onward.router.instance_registry import REGISTER_INTERVAL_S, InstanceInfo
from onward.router.model_cards import MODELS_PATH, merge_model_cards, with_model_names
from onward.router.stream_runner import StreamRunner, log_instance_state
from onward.transport.addresses import is_loopback
from onward.transport.cluster_signature import verify_signature
from onward.transport.http_urls import parse_server_url
from onward.transport.message_decoding import decode_message
from onward.version import __version__
from onward.web import asgi
from onward.web.http_responses import health_response, json_response, metrics_response
from onward.web.json_body import short_repr
from onward.web.openai_api.model_names import model_not_found

MAX_REGISTRATION_BYTES = 16 << 20
_logger = logging.getLogger(__name__)
_registrations = msgspec.msgpack.Decoder(Registration)


class UnsignedRegistration(OnwardError):
    status = 401
    code = "not_proven"
    kind = "invalid_request_error"


class RouterAdminEndpoints:
    def __init__(self, runner: StreamRunner, registry: Registry, cluster_key: str) -> None:
        self._serving = runner
        self._core = runner.core
        self._registry = registry
        self._cluster_key = cluster_key

    async def openapi(self, _: Request) -> Response:
        """Returns the API description of an instance, with the names of all models. Raises `Unavailable` if no instance
        answers."""
        document = await self._ask_any(
            self._core.instances.list_instances(self._serving.clock.now_s()), "/openapi.json"
        )
        if document is None:
            raise Unavailable("no instance can answer this now", retry_after_s=RETRY_SOON_S)
        return json_response(with_model_names(document, self._core.models.served().names()))

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": await self.model_cards()})

    def served_names(self) -> Collection[str]:
        """Returns every name that clients may ask for."""
        return self._core.models.served().names()

    async def model(self, request: Request) -> Response:
        name, cards = request.path_params["model"], await self.model_cards()
        for card in cards:
            if card["id"] == name:
                return json_response(card)
        raise model_not_found(name, [card["id"] for card in cards])

    async def model_cards(self) -> list[dict[str, Any]]:
        """Returns a card for every model with an instance that answers, for its aliases, and for the routes that lead
        to it."""
        now_s = self._serving.clock.now_s()
        by_model: dict[str, list[InstanceInfo]] = {}
        for instance in self._core.instances.list_instances(now_s):
            by_model.setdefault(instance.model, []).append(instance)
        documents = await asyncio.gather(*(self._ask_any(some, MODELS_PATH) for some in by_model.values()))
        cards = merge_model_cards(documents, self._core.models.routes)
        if not cards:
            raise Unavailable("no instance can answer this now", retry_after_s=RETRY_SOON_S)
        return cards

    async def _ask_any(self, instances: Iterable[InstanceInfo], path: str) -> Any | None:
        for instance in instances:
            reply = await self._serving.upstream.get(instance.url, path)
            if reply is not None and reply[0] == 200:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    return msgspec.json.decode(reply[1])
        return None

    async def health(self, request: Request) -> Response:
        if not self._core.can_serve(self._serving.clock.now_s()):
            return health_response(request, "unavailable", "there is no instance to serve requests")
        return health_response(request, "ok", None)

    async def live(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        return metrics_response(self._registry.snapshot())

    async def info(self, _: Request) -> Response:
        shown = dataclasses.asdict(self._core.config)
        # A key given on the command line is a secret; for a key file only its name is shown.
        del shown["api_key"]
        return json_response(
            {
                "version": __version__,
                "role": "router",
                "incarnation": self._core.incarnation,
                "pids": {"router": [os.getpid()]},
                "configuration": shown,
                "models": self._core.models.served().names(),
                "routes": self._core.models.routes,
                **self._core.status(self._serving.clock.now_s()),
            }
        )

    async def status(self, _: Request) -> Response:
        return json_response(self._core.status(self._serving.clock.now_s()))

    async def register(self, request: Request) -> Response:
        try:
            body = await asgi.read_body(request.receive, MAX_REGISTRATION_BYTES)
        except asgi.ClientDisconnected:
            raise ClientError("the instance has gone") from None
        if self._cluster_key:
            self._check_cluster_auth(request, body)
        registration = decode_registration(body)
        reply = self._register(registration)
        return Response(msgspec.msgpack.encode(reply), media_type="application/msgpack")

    def _register(self, registration: Registration) -> RegistrationReply:
        if not self._cluster_key and _is_on_another_machine(registration.url):
            # Without a cluster key all instances are on this machine. A stranger's word sends prompts nowhere else.
            url = short_repr(registration.url)
            error = f"url is {url}, on another machine; that needs a --cluster-key-file here and there"
            _logger.warning(log.event("instance not taken", url=registration.url, error=error))
            return RegistrationReply(self._core.incarnation, REGISTER_INTERVAL_S, error)
        previous = self._core.instances.get(registration.instance)
        reply = self._core.register(registration, self._serving.clock.now_s())
        current = self._core.instances.get(registration.instance)
        if (previous and previous.state) != (current and current.state):
            self._serving.notify_change()
            log_instance_state(registration, current)
        if reply.error:
            _logger.warning(log.event("instance not taken", url=registration.url, error=reply.error))
        return reply

    def _check_cluster_auth(self, request: Request, body: bytes) -> None:
        proof = request.headers.get(SIGNATURE_HEADER)
        path, wall_s = request.scope["path"], self._serving.clock.wall_s()
        if not verify_signature(self._cluster_key, proof, request.method, path, body, wall_s):
            raise UnsignedRegistration(f"{SIGNATURE_HEADER}: a proof of the cluster's key is required")


def _is_on_another_machine(url: str) -> bool:
    try:
        return not is_loopback(parse_server_url(url).host)
    except ValueError:
        return False  # refused for another reason


def decode_registration(body: bytes) -> Registration:
    try:
        return decode_message(_registrations, body)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the registration: {fault}") from None
