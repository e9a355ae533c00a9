"""Checks the inputs of `onward.LLM` before anything runs. An error names the place: `prompts[3]`,
`messages[0].role`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from onward.config import ServeConfig, with_defaults
from onward.errors import InvalidRequest, StartupError
from onward.offline.sampling_options import SamplingOptions
from onward.optional_packages import require_torch
from onward.proto.speculative_config import parse_speculative

LLM_ARGS = (
    "revision",
    "chat_template",
    "device",
    "gpu_memory_utilization",
    "deterministic",
    "dtype",
    "quantization",
    "load_format",
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "threads",
    "speculative",
)
_ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]
Options = SamplingOptions | Sequence[SamplingOptions] | None


def build_config(model: str, llm_args: Mapping[str, Any]) -> ServeConfig:
    for name, value in llm_args.items():
        if name not in LLM_ARGS:
            raise InvalidRequest(f"{name}: no such argument; there are {', '.join(LLM_ARGS)}", param=name)
        _check_llm_arg(name, value)
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model: must be a name, a folder or a .gguf file", param="model")
    config: ServeConfig = with_defaults(ServeConfig, {"model": model, **llm_args})
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise InvalidRequest(
            f"max_num_batched_tokens: must be at least max_num_seqs ({config.max_num_seqs}), "
            f"got {config.max_num_batched_tokens}",
            param="max_num_batched_tokens",
        )
    if config.device == "cuda" and config.speculative is not None:
        raise InvalidRequest("speculative: drafts are verified on device cpu only, not on cuda", param="speculative")
    return config


def _check_llm_arg(name: str, value: object) -> None:
    if name == "speculative":
        _check_speculative(value)
        return
    hint = get_type_hints(ServeConfig)[name]
    if hint == str | None:
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidRequest(f"{name}: must be a text, got {value!r:.80}", param=name)
        return
    default = next(field.default for field in dataclasses.fields(ServeConfig) if field.name == name)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name}: must be true or false, got {value!r:.80}", param=name)
    elif isinstance(default, float):
        if not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise InvalidRequest(f"{name}: must be a number above 0 and at most 1, got {value!r:.80}", param=name)
    elif isinstance(default, str):
        if value not in get_args(hint):
            raise InvalidRequest(f"{name}: must be one of {', '.join(get_args(hint))}, got {value!r:.80}", param=name)
    elif not (value is None and default is None) and (not isinstance(value, int) or value < 1):
        raise InvalidRequest(f"{name}: must be a whole number of at least 1, got {value!r:.80}", param=name)


def _check_speculative(value: object) -> None:
    try:
        if value is not None and parse_speculative(str(value)).kind == "eagle":
            require_torch(str(value))
    except StartupError as error:
        raise InvalidRequest(f"speculative: {error.message}", param="speculative") from None


def list_prompts(prompts: Any) -> list[tuple[str, Prompt]]:
    """Returns each prompt with the path that names it in an error."""
    if isinstance(prompts, str):
        return [("prompts", prompts)]
    if not isinstance(prompts, Sequence) or not prompts:
        raise InvalidRequest("prompts: must be a text, its token ids, or a list of such", param="prompts")
    if isinstance(prompts[0], int):
        return [("prompts", prompts)]
    return [(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def validate_token_ids(prompt: Any, path: str, vocab_size: int) -> list[int]:
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidRequest(f"{path}: must be a text or its token ids, got {prompt!r:.80}", param="prompts")
    for index, token_id in enumerate(prompt):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{path}[{index}]: must be a token id between 0 and {vocab_size - 1} (the vocabulary), "
                f"got {token_id!r:.80}",
                param="prompts",
            )
    return list(prompt)


def list_conversations(messages: Any) -> list[tuple[str, Conversation]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages: must be a list of messages, or a list of such lists", param="messages")
    if isinstance(messages[0], Mapping):
        return [("messages", messages)]
    return [(f"messages[{index}]", conversation) for index, conversation in enumerate(messages)]


def check_conversation(conversation: Any, path: str) -> None:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidRequest(f"{path}: must be a list of messages that is not empty", param="messages")
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{path}[{index}]: must be a message with role and content", param="messages")
        if message.get("role") not in _ROLES:
            raise InvalidRequest(f"{path}[{index}].role: must be one of {', '.join(_ROLES)}", param="messages")
        if message.get("content") is None:
            raise InvalidRequest(f"{path}[{index}].content: is required", param="messages")


def expand_sampling(sampling: Options, count: int) -> list[SamplingOptions]:
    if sampling is None or isinstance(sampling, SamplingOptions):
        return [sampling or SamplingOptions()] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(options, SamplingOptions) for options in sampling):
        raise InvalidRequest("sampling: must be SamplingOptions, or a list of them", param="sampling")
    if len(sampling) != count:
        raise InvalidRequest(
            f"sampling: must be one for each of the {count} prompts, got {len(sampling)}", param="sampling"
        )
    return list(sampling)


def check_token_ids_exist(options: SamplingOptions, vocab_size: int) -> None:
    """Checks that the token ids in the options exist in the vocabulary, which the options themselves cannot know."""
    for token_id in options.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: must name token ids between 0 and {vocab_size - 1} (the vocabulary), got {token_id}",
                param="logit_bias",
            )
