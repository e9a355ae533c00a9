"""A stand-in instance with a tokenizer and a template, and a prefix cache that it tells of."""

import asyncio
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from onward.proto.block_hash import block_hashes
from onward.proto.kv_events import KvEvents
from onward.proto.model import TokenizerFiles
from onward.proto.router import TOKENIZER_FILES_PATH, Registration
from onward.text.prompt_tokenizer import read_tokenizer_files, tokenizer_hash
from tests.api import small_model
from tests.router.stand_in_instance import StandInInstance, respond


@cache
def small_text() -> TokenizerFiles:
    with TemporaryDirectory() as folder:
        return read_tokenizer_files(small_model.prepare(Path(folder)))


class TextInstance(StandInInstance):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.announced = self.told = small_text()
        """What its hash is of, and what it answers when asked."""
        self.cached: list[bytes] = []
        self.num_asked = 0
        """For its text."""

    def cache(self, token_ids: list[int]) -> None:
        self.cached = block_hashes(token_ids, self.registration().block_size, "")

    def registration(self) -> Registration:
        changes = [(True, block) for block in self.cached]
        return msgspec.structs.replace(
            super().registration(),
            tokenizer_hash=tokenizer_hash(self.announced),
            kv_events=KvEvents(0, changes, reset=True),
        )

    async def _answer(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path != TOKENIZER_FILES_PATH:
            await super()._answer(path, body, reader, writer)
            return
        self.num_asked += 1
        respond(writer, 200, msgspec.msgpack.encode(self.told))
        await writer.drain()
