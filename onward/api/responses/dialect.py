"""`/v1/responses`: items in, items out. A chat to all that is behind it."""

from collections.abc import Iterator
from contextlib import contextmanager

from onward.api.chat import Chat
from onward.api.identity import Identity
from onward.api.jobs import Job, Jobs
from onward.api.pieces import Text
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.requests import Bounds, ChatRequest
from onward.api.responses.request import ResponseRequest, decode_response, in_its_words
from onward.api.responses.step_text import StepText
from onward.api.responses.writer import ResponseWriter
from onward.api.work_queues import ByTemplate
from onward.errors import ClientError
from onward.proto.cursor import Cursor
from onward.proto.router import Attempt
from onward.proto.sampling import Sampling
from onward.proto.step import WorkerHello
from onward.proto.thinking import ThinkingRule
from onward.web.response_ids import PREFIX


class Responses:
    id_prefix = PREFIX
    shows_text = True

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._chat = Chat(prompts)

    def decode(self, body: bytes, bounds: Bounds) -> tuple[ResponseRequest, tuple[str, ...]]:
        return decode_response(body, bounds), ()

    def prompts(self, request: ChatRequest, created_s: int) -> list[list[int]]:
        return self._chat.prompts(request, created_s)

    def prompt_path(self, request: ChatRequest, index: int) -> str:
        return "input"

    def thinking(self, request: ChatRequest, prompts: list[list[int]], *, has_grammar: bool) -> ThinkingRule | None:
        return self._chat.thinking(request, prompts, has_grammar=has_grammar)

    def new_text(self, prepared: Prepared, sampling: Sampling) -> Text:
        return StepText(self._chat.new_text(prepared, sampling))

    def writer(self, prepared: Prepared) -> ResponseWriter:
        return ResponseWriter(self._prompts, prepared)


class ResponseJobs(Jobs):
    """Jobs whose complaints name the fields of a response, and not those of the chat that it is."""

    def of_client(
        self, identity: Identity, body: bytes, cursor: Cursor | None = None
    ) -> Prepared | ByTemplate[Prepared]:
        with _its_words():
            return super().of_client(identity, body, cursor)

    def of_attempt(self, attempt: Attempt, started_at_s: float, *, is_routed: bool) -> Prepared | ByTemplate[Prepared]:
        with _its_words():
            return super().of_attempt(attempt, started_at_s, is_routed=is_routed)

    async def with_checked_structure(self, prepared: Prepared) -> Prepared:
        with _its_words():
            return await super().with_checked_structure(prepared)

    def start(self, prepared: Prepared, limits: WorkerHello) -> Job:
        with _its_words():
            return super().start(prepared, limits)


@contextmanager
def _its_words() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise in_its_words(error) from error
