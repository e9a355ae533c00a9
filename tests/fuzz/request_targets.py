"""What a client can send (bodies, names to abort, the header by which it comes back), and the table of clients' keys."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from onward.api.messages.chat_request import decode_count, decode_message
from onward.api.requests.decoding import decode_chat, decode_completion, decode_tokens
from onward.api.requests.embedding_request import decode_embedding
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.similarity_request import RerankRequest, ScoreRequest, decode_rerank, decode_score
from onward.api.responses.chat_request import decode_response
from onward.api.responses.input_tokens import decode_input
from onward.errors import ClientError, InvalidRequest, StartupError
from onward.grammar.grammar_errors import InvalidGrammar
from onward.grammar.llguidance_source import structural_tag_to_lark
from onward.proto.cursor import format_cursor, parse_cursor
from onward.proto.model import TokenizerFiles
from onward.text.chat_template import ChatTemplate
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.length_check import CONTEXT_LENGTH_EXCEEDED
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer
from onward.web.auth.api_key_table import parse_table
from onward.web.ollama_api.answer_kind import AnswerKind
from onward.web.ollama_api.ollama_answers import OllamaAnswerWriter
from onward.web.ollama_api.ollama_conversion import ConvertedRequest, convert_chat, convert_embed, convert_generate
from onward.web.openai_api.abort_request import decode_abort, decode_routed_abort
from onward.web.openai_api.compaction import decode_compact, encode_summary, summary_request
from onward.web.openai_api.template_fields import template_options
from tests.fuzz.case import Target
from tests.fuzz.mutation import byte_cases, cases
from tests.models.checkpoints import GPT2_TOKENIZER

HUGE_TIMES = 300_000
MAX_COUNTED_CHARS = 20_000
BOUNDS = ValidationContext("m", vocab_size=1000, max_choices=8)
SHARED: dict[str, Any] = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.5,
    "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [1], "min_tokens": 1,
    "ignore_eos": True, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 7], "stop_regex": ["[ab]{1,3}c", "(x|yz?)w"],
    "bad_words": ["x y"], "prompt_logprobs": 1, "n": 2, "priority": 1, "deadline_ms": 1000,
    "cache_salt": "s", "generated_token_ids": [[1, 2], [3]], "generated_finish_reasons": [None, "stop"],
    "rescore_from": [0, 1],
}  # fmt: skip
ONE = {**SHARED, "n": 1, "generated_token_ids": [1, 2], "generated_finish_reasons": [None], "rescore_from": 1}
ALIASED = {"model": "m", "completion_token_ids": [1, 2], "generated_token_ids": [1, 2]}
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "ok", "tool_call_id": "1", "name": "f"},
]
CHAT = [
    {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    {**SHARED, "messages": MESSAGES, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2},
    {**ONE, "messages": MESSAGES, "tools": [], "response_format": {"type": "text"}, "user": "u", "unknown": [1]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "b"},
            {"role": "critic", "content": "c"},
        ],
        "functions": [{"name": "f", "parameters": {"type": "object"}}],
        "function_call": {"name": "f"},
        "truncate_prompt_tokens": -1,
        "truncation_side": "right",
    },
    {"messages": [{"role": "assistant", "content": "a"}], "echo": True, "continue_final_message": True},
]
COMPLETION = [
    {**ALIASED, "prompt": "a"},
    {**SHARED, "prompt": "hello", "logprobs": 1},
    {**ONE, "prompt": [1, 2, 3]},
    {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 2, "truncation_side": "left"},
    {"model": "m", "prompt": "a"},
]
TOKENS = [{**SHARED, "prompt_token_ids": [1, 2, 3]}, {"model": "m", "prompt_token_ids": [5], "logprobs": 2}]
RERANK = [
    {"model": "m", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False},
    {"model": "m", "query": "a", "documents": ["b"], "pooling": "last", "priority": 1, "deadline_ms": 5},
]
POOLING = [
    {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "normalize": False, "task": "embed"},
    {"model": "m", "input": [[1, 2], [3]], "pooling": "last", "priority": 1, "deadline_ms": 5, "cache_salt": "s"},
]
FORMATS = [
    {"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "a/b"}, {"type": "regex", "pattern": "[a-c]{1,3}/"},
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "<u>"]},
    ]}},
    {"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<f="], "at_least_one": True, "stop_after_first": False, "tags": [
            {"type": "tag", "begin": "<f=g>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"},
        ],
    }},
    {"format": {"type": "tags_with_separator", "separator": ",", "tags": [
        {"begin": "<", "content": {"type": "or", "elements": [{"type": "regex", "pattern": "a"}]}, "end": ">"},
    ]}},
]  # fmt: skip
SCORE = [{"model": "m", "text_1": ["a", "b"], "text_2": ["c", "d"]}, {"model": "m", "text_1": "a", "text_2": "b"}]
RESPONSE: list[Any] = [
    {"model": "m", "input": "hello"},
    {
        "model": "m", "instructions": "be brief", "stream": True, "stream_options": {"include_obfuscation": False},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.5, "metadata": {"k": "v"}, "user": "u",
        "truncation": "disabled", "background": True, "store": True, "previous_response_id": "resp_x", "seed": 7,
    },
    {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": True}}},
]  # fmt: skip
COMPACT: list[Any] = [
    {"model": "m", "input": "hello", "instructions": "be brief", "max_output_tokens": 9, "seed": 7},
    {"model": "m", "previous_response_id": "resp_x"},
    {"model": "m", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "compaction", "id": "c", "encrypted_content": encode_summary("b")},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]},
]  # fmt: skip
MESSAGE: list[Any] = [
    {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    {
        "model": "m", "max_tokens": 9, "stream": True, "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "b", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "d"}], "is_error": True},
                {"type": "text", "text": "e"},
            ]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.5,
        "top_k": 5, "metadata": {"user_id": "u"}, "service_tier": "auto", "seed": 7, "container": None, "unknown": 1,
        "generated_token_ids": [1, 2], "generated_finish_reasons": [None],
    },
    {
        "model": "m", "max_tokens": 5, "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {}}},
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"},
    },
]  # fmt: skip
OLLAMA_FIELDS: dict[str, Any] = {
    "model": "m", "stream": False, "format": "json", "think": "high", "keep_alive": "5m", "logprobs": True,
    "top_logprobs": 2, "truncate": True, "shift": False, "unknown": 1, "priority": 1, "deadline_ms": 5, "cache_salt": "s",
    "options": {
        "num_predict": 5, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ["x"],
        "repeat_penalty": 1.1, "repeat_last_n": -1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "num_ctx": 5,
        "mirostat": 0, "num_gpu": 1, "odd": 1,
    },
}  # fmt: skip
OLLAMA_CHAT: list[Any] = [
    {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    {
        **OLLAMA_FIELDS,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a", "images": []},
            {"role": "assistant", "thinking": "b", "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}},
                {"function": {"name": "g"}},
            ]},
            {"role": "tool", "content": "d", "tool_name": "g"},
            {"role": "tool", "content": "e", "tool_call_id": "c"},
            {"role": "assistant", "content": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    {"model": "m", "messages": [], "keep_alive": 5},
]  # fmt: skip
OLLAMA_GENERATE: list[Any] = [
    {**OLLAMA_FIELDS, "prompt": "hello", "system": "be brief", "suffix": "", "context": [], "template": ""},
    {"model": "m", "prompt": "hello", "raw": True, "format": {"type": "object"}},
]
OLLAMA_EMBED: list[Any] = [{"model": "m", "input": ["a", "b"], "dimensions": 2, "truncate": True, "options": {"a": 1}}]
OLLAMA_EVENTS = [
    b'id: 1\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"logprobs":{"content":[{}]}}]}\n\n'
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{}"}}]}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\n: waiting\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'event: error\ndata: {"error":{"message":"a","param":null}}\n\n',
]
TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
CURSORS = [
    b"1;5f0c9d3e;1767225600;42;3;17,9:stop;0:19556+33",
    b"1;a;0;-1;0;1;0:5",
    b"1;a.b_c-d;137438953471;18446744073709551615;9223372036854775807;2147483647:length,0;1:3",
    b"1;a;5;5;5;1:stop,2:length;usage",
    b"1;a;5;5;5;3;",
]


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _prompt_tokens() -> PromptTokenizer:
    return PromptTokenizer(TokenizerFiles(build_tokenizer(GPT2_TOKENIZER).to_str(), TEMPLATE, None, None))


_TOKENS = _prompt_tokens()


def _chat_prompt(body: bytes) -> None:
    request, _ = decode_chat(body, BOUNDS)
    request.prior_token_ids(), request.prior_finish_reasons(), request.rescore_positions(), request.stop_strings()
    assert all(request.stop_patterns())
    token_ids = _TOKENS.tokenize_chat(request.messages, 0, template_options(request)) if request.messages else []
    assert all(0 <= token_id < 1000 for token_id in token_ids)


def _completion(body: bytes) -> None:
    request, _ = decode_completion(body, BOUNDS)
    request.prior_token_ids(), request.prior_finish_reasons(), request.rescore_positions()
    for index, prompt in enumerate(request.prompts()):
        assert request.prompt_path(index)
        if isinstance(prompt, str):
            _TOKENS.tokenize_text(prompt)


def _huge_text(data: bytes) -> None:
    """Whatever its length, a text is refused quickly, and not if it fits."""
    repeated, max_tokens, is_chat = json.loads(data)
    text = "".join(piece * times for piece, times in repeated)
    try:
        if is_chat:
            _TOKENS.tokenize_chat([ChatMessage("user", text)], 0, max_tokens=max_tokens)
        else:
            _TOKENS.tokenize_text(text, max_tokens)
    except InvalidRequest as refused:
        # The check by characters is exact only for tokenizers that drop nothing; this one drops what it does not know.
        is_known = all(_TOKENS.tokenize_text(character) for character in set(text))
        if refused.code == CONTEXT_LENGTH_EXCEEDED and len(text) <= MAX_COUNTED_CHARS and is_known:
            assert len(_TOKENS.tokenize_text(text)) > max_tokens, "it would have fitted"
        raise


def _huge_texts() -> st.SearchStrategy[bytes]:
    piece = st.text(max_size=12) | st.sampled_from(["1", " ", "a", "\n", "the ", "é", "#"])
    repeated = st.lists(st.tuples(piece, st.integers(1, 50) | st.integers(1, HUGE_TIMES)), min_size=1, max_size=4)
    return st.builds(lambda *case: _json(case), repeated, st.sampled_from([16, 8192, 131_072]), st.booleans())


def _tokens(body: bytes) -> None:
    request, _ = decode_tokens(body, BOUNDS)
    request.prior_token_ids(), request.prior_finish_reasons(), request.rescore_positions()


def _response(body: bytes) -> None:
    request, _ = decode_response(body, BOUNDS)
    token_ids = _TOKENS.tokenize_chat(request.messages, 0, template_options(request))
    assert all(0 <= token_id < 1000 for token_id in token_ids)


def _similar(request: RerankRequest | ScoreRequest) -> None:
    for index, text in enumerate(request.inputs()):
        assert isinstance(text, str) and text and request.input_path(index)
    if isinstance(request, ScoreRequest):
        assert all(max(pair) < len(request.inputs()) for pair in request.pairs())


def _pooling(body: bytes) -> None:
    request, _ = decode_embedding(body, BOUNDS, 8)
    for index, text in enumerate(request.inputs()):
        assert text and request.input_path(index)


def _structural_format(body: bytes) -> None:
    try:
        source = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidGrammar("it is not JSON") from None
    if not isinstance(source, dict):
        raise InvalidGrammar("it is no object")
    assert structural_tag_to_lark(source, {}, lambda name: False).startswith("start: ")


def _input_tokens(body: bytes) -> None:
    messages, fields = decode_input(body, BOUNDS)
    _TOKENS.tokenize_chat(messages, 0, template_options(fields))


def _message(body: bytes) -> None:
    request, _ = decode_message(body, BOUNDS)
    token_ids = _TOKENS.tokenize_chat(request.messages, 0, template_options(request))
    assert all(0 <= token_id < 1000 for token_id in token_ids)


def _count(body: bytes) -> None:
    messages, fields, _ = decode_count(body, BOUNDS)
    _TOKENS.tokenize_chat(messages, 0, template_options(fields))


def _compact(body: bytes) -> None:
    decode_response(summary_request(decode_compact(body)), BOUNDS)


def _converted(converted: ConvertedRequest) -> None:
    """What a conversion accepts, the endpoint that gets it reads, or refuses as a client's."""
    body = converted.body(converted.model)
    if converted.path == "/v1/chat/completions":
        _chat_prompt(body)
    elif converted.path == "/v1/completions":
        _completion(body)
    elif converted.path:
        decode_embedding(body, BOUNDS, 64)


def _ollama_lines(data: bytes) -> None:
    """However a stream is cut into parts, its lines are the same."""
    expected = OllamaAnswerWriter("m", AnswerKind.CHAT).lines(data, 0.0)
    writer = OllamaAnswerWriter("m", AnswerKind.CHAT)
    assert b"".join(writer.lines(data[at : at + 7], 0.0) for at in range(0, len(data), 7)) == expected
    for line in expected.splitlines():
        json.loads(line)


def _aborts(body: bytes) -> None:
    decode_routed_abort(body)
    decode_abort(body)


def _cursor(line: bytes) -> None:
    text = line.decode("latin-1")  # as a header comes
    cursor = parse_cursor(text)
    assert format_cursor(cursor) == text, "one way to write each"
    assert all(len(ids) <= cursor.choices[index].position for index, ids in cursor.new_tokens.items())


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% elif x %}", "{% else %}", "{% endif %}",
    "{{ m.content }}", "{{ messages | tojson }}", "{% for i in range(300) %}", "{% for c in 'abc' recursive %}",
    "{{ loop(m) }}", "{{ loop.index }}", "{% macro f(a, b=1) %}", "{% endmacro %}", "{{ f(1) }}", "{{ f(f(m)) }}",
    "{% call f() %}", "{% endcall %}", "{% set x = namespace(a=1) %}", "{% set x.a = x.a + 1 %}",
    "{% set x = 'ab' * 5 %}", "{{ x * 10**9 }}", "{{ 2 ** 99999999 }}",
    "{{ messages[0]['content'] | trim | upper | replace('a', 'b') }}", "{{ messages[-1] }}",
    "{{ messages[1:] | length }}", "{{ x.__class__ }}", "{{ ''.format.__globals__ }}", "{{ cycler.__init__ }}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{% generation %}", "{% endgeneration %}",
    "{% break %}", "{% continue %}", "{% filter upper %}", "{% endfilter %}",
    "{{ [1, 2] | map('string') | join(',') }}", "{{ messages | selectattr('role') | list }}", "{# c #}", "text\n",
    "{%- if bos_token -%}", "{{ 1 / 0 }}", "{{ missing.a.b }}", "{% include 'a' %}", "{% import 'a' as b %}",
    "{% extends 'a' %}", "{% block b %}", "{% endblock %}", "{{ self.b() }}", "{% raw %}", "{% endraw %}",
    "{{ '%s' % m }}", "{{ '{0.x}'.format(m) }}", "{{ messages | groupby('role') | list }}",
    "{{ messages | sort(attribute='role') | first }}", "{{ x is defined and x in [1] }}", "{{ caller() }}",
    "{% with a = 1 %}", "{% endwith %}", "{{ dict(a=1).items() | list }}", "{{ joiner(',')() }}",
]  # fmt: skip
SOURCES: list[Any] = [
    [[PIECES[i] for i in chosen], MESSAGES]
    for chosen in (
        [0, 6, 1],
        [0, 2, 6, 4, 7, 5, 1],
        [8, 6, 1],
        [12, 6, 13, 14],
        [18, 0, 19, 1, 20],
        [9, 11, 1],
        [0, 33, 1],
    )
]


def _template_case(tree: Any) -> bytes:
    """Numbers stand for pieces, so that a change puts another piece there."""
    source, messages = [*tree, [], []][:2] if isinstance(tree, list) else ([], [])
    pieces = source if isinstance(source, list) else [source]
    text = "".join(PIECES[one % len(PIECES)] if isinstance(one, int) else str(one) for one in pieces)
    return _json([text, messages])


def _template(data: bytes) -> None:
    try:
        source, messages = json.loads(data)
    except (ValueError, TypeError, RecursionError):  # not the template's to read
        return
    if isinstance(source, str) and isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        text = ChatTemplate(source, max_steps=20_000, max_chars=100_000).render(messages, created_s=0.0)
        assert len(text) <= 100_000


KEYS = f"""
[[key]]
name = "team-a"
hash = "blake2b:{"0a" * 32}"
role = "admin"
max_in_flight = 8
tokens_per_minute = 60000
priority = -10
max_connections = 64
[[key]]
name = "b"
hash = "blake2b:{"0b" * 32}"
""".encode()


def _keys(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # the file's reader has refused it
        return
    parse_table(text, "keys.toml")


TARGETS = [
    Target("keys", byte_cases([KEYS]), _keys, (StartupError,)),
    Target("chat", cases(CHAT, _json), _chat_prompt, (ClientError,)),
    Target("completion", cases(COMPLETION, _json), _completion, (ClientError,)),
    Target("huge_text", _huge_texts(), _huge_text, (ClientError,)),
    Target("tokens", cases(TOKENS, _json), _tokens, (ClientError,)),
    Target("response", cases(RESPONSE, _json), _response, (ClientError,)),
    Target("input_tokens", cases(RESPONSE, _json), _input_tokens, (ClientError,)),
    Target("compact", cases(COMPACT, _json), _compact, (ClientError,)),
    Target("rerank", cases(RERANK, _json), lambda body: _similar(decode_rerank(body, BOUNDS)[0]), (ClientError,)),
    Target("score", cases(SCORE, _json), lambda body: _similar(decode_score(body, BOUNDS)[0]), (ClientError,)),
    Target("pooling", cases(POOLING, _json), _pooling, (ClientError,)),
    Target("structural_format", cases(FORMATS, _json), _structural_format, (InvalidGrammar,)),
    Target("message", cases(MESSAGE, _json), _message, (ClientError,)),
    Target("count_tokens", cases(MESSAGE, _json), _count, (ClientError,)),
    Target("ollama_chat", cases(OLLAMA_CHAT, _json), lambda body: _converted(convert_chat(body)), (ClientError,)),
    Target(
        "ollama_generate",
        cases(OLLAMA_GENERATE, _json),
        lambda body: _converted(convert_generate(body)),
        (ClientError,),
    ),
    Target("ollama_embed", cases(OLLAMA_EMBED, _json), lambda body: _converted(convert_embed(body)), (ClientError,)),
    Target("ollama_lines", byte_cases(OLLAMA_EVENTS), _ollama_lines, (msgspec.MsgspecError, UnicodeDecodeError)),
    Target("aborts", cases([{"ids": ["a", "b"]}, {"all": True}], _json), _aborts, (ClientError,)),
    Target("cursor", byte_cases(CURSORS), _cursor, (ValueError,)),
    Target("template", cases(SOURCES, _template_case), _template, (ClientError, StartupError)),
]
