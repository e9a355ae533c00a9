"""Everything about text that needs the model's files: prompts in, text streams out. Runs in a thread; knows no HTTP."""

from collections.abc import Callable

from onward.api.grammar_gate import GrammarGate
from onward.api.logprobs import TextOffsets, TokenNames
from onward.api.openai import ChatRequest, CompletionRequest
from onward.proto.model import ModelText
from onward.proto.sampling import Sampling
from onward.text.bad_words import bad_word_token_ids
from onward.text.prompt_tokens import PromptTokens
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from onward.text.tokenizer import Tokenizer
from onward.web.body import wrong


class Prompts:
    def __init__(
        self, text: ModelText, new_gate: Callable[[ModelText, Tokenizer | None], GrammarGate] = GrammarGate
    ) -> None:
        self._tokens = PromptTokens(text)
        self._tokenizer = self._tokens.tokenizer
        self._table = self._tokenizer.table if self._tokenizer else TokenTable([])
        self.names = TokenNames(self._table)
        self.gate = new_gate(text, self._tokenizer)

    def of_chat(self, request: ChatRequest, created_s: int) -> list[int]:
        return self._tokens.of_chat(request.messages, created_s)

    def of_completion(self, request: CompletionRequest, created_s: int) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        return self._tokens.of_text(request.prompt)

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        return bad_word_token_ids(words, self._tokenizer)

    def new_offsets(self) -> TextOffsets:
        return TextOffsets(self._table)

    def new_text(self, stop: list[str], sampling: Sampling) -> TextStream:
        if stop and self._tokenizer is None:
            raise wrong("stop", "this model has no tokenizer, so there is no text to find it in; use stop_token_ids")
        return TextStream(
            self._table,
            tuple(stop),
            end_token_ids=sampling.end_token_ids,
            min_tokens=sampling.min_tokens,
        )
