"""Converts Anthropic's messages to chat messages, the only form that chat templates read.

A user's turn holds results of tools and text in one list of blocks; a chat has a message of the role `tool` for each
result. An assistant's text, thinking and tool calls are blocks of one message in both. An error names the path of the
block in the client's request. Used by api processes, and by routers that tokenize prompts.
"""

from typing import Any

import msgspec

from onward.text.prompt_tokenizer import ChatMessage
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import MAX_CALL_ID_LENGTH, MAX_CALLS_PER_MESSAGE

MAX_MESSAGES = 100_000
"""The limit of Anthropic's API."""
MAX_BLOCKS = 4096
"""Content blocks of one message."""
_ROLES = ("user", "assistant", "system")
_USER_BLOCKS = ("text", "tool_result")
_RESULT_BLOCKS = ("text", "tool_reference", "image", "document")
_UNREADABLE_BLOCKS = ("image", "document")
"""Blocks of a tool's result that are replaced by a note. An agent could not go on if its history were refused."""
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")


def to_chat_messages(system: str | list[Any] | None, messages: list[Any]) -> list[ChatMessage]:
    if not messages:
        raise field_error("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise field_error("messages", f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    chat = [] if not system else [ChatMessage("system", _text_of(system, "system"))]
    for index, message in enumerate(messages):
        chat += _message(message, f"messages[{index}]")
    return chat


def continues_last_message(messages: list[Any]) -> bool:
    """Returns whether the conversation ends with the assistant's turn. The answer then continues its text."""
    last = messages[-1] if messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def check_last_message(messages: list[Any]) -> None:
    """Refuses a conversation that ends with an assistant's turn without text to continue."""
    if not continues_last_message(messages):
        return
    content, path = messages[-1].get("content"), f"messages[{len(messages) - 1}].content"
    block = content[-1] if isinstance(content, list) and content else None
    if isinstance(block, dict) and block.get("type") != "text":
        raise field_error(
            f"{path}[{len(content) - 1}].type",
            f"the last message can be continued only if it ends with text, got {short_repr(block.get('type'))}",
        )


def _message(message: Any, path: str) -> list[ChatMessage]:
    if not isinstance(message, dict):
        raise field_error(path, f"must be a message, got {short_repr(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise field_error(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {short_repr(role)}")
    if role == "system":
        return [ChatMessage("system", _text_of(content, f"{path}.content"))]
    if isinstance(content, str):
        return [ChatMessage(role, content)]
    blocks = _blocks(content, f"{path}.content")
    return [_assistant_message(blocks, f"{path}.content")] if role == "assistant" else _user_messages(blocks, path)


def _user_messages(blocks: list[dict[str, Any]], path: str) -> list[ChatMessage]:
    """Returns one message for adjacent texts, and one for each tool result."""
    messages: list[ChatMessage] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append(ChatMessage("user", "\n".join(texts)))
            texts.clear()

    for index, block in enumerate(blocks):
        block_path = f"{path}.content[{index}]"
        if _type_of(block, block_path, _USER_BLOCKS) == "text":
            texts.append(_string(block, "text", block_path))
            continue
        flush()
        tool_use_id = _id(block, "tool_use_id", block_path)
        content = block.get("content")
        text = "" if content in (None, []) else _result_text(content, f"{block_path}.content")
        messages.append(ChatMessage("tool", text, tool_call_id=tool_use_id))
    flush()
    return messages


def _assistant_message(blocks: list[dict[str, Any]], path: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        match _type_of(block, block_path, _ASSISTANT_BLOCKS):
            case "text":
                texts.append(_string(block, "text", block_path))
            case "thinking":
                thoughts.append(_string(block, "thinking", block_path))
            case "tool_use":
                calls.append(_call(block, block_path))
            case _:
                pass  # redacted thinking is encrypted: its text is not known here
    if len(calls) > MAX_CALLS_PER_MESSAGE:
        raise field_error(path, f"at most {MAX_CALLS_PER_MESSAGE} tool_use blocks, got {len(calls)}")
    content = "".join(texts) if texts or not calls else None
    return ChatMessage(
        "assistant", content, tool_calls=calls or None, reasoning_content="\n".join(filter(None, thoughts)) or None
    )


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise field_error(f"{path}.input", f"is required: a JSON object, got {short_repr(arguments)}")
    name = block.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_CALL_ID_LENGTH:
        raise field_error(f"{path}.name", f"is required: a string of 1 to {MAX_CALL_ID_LENGTH} characters")
    try:
        text = msgspec.json.encode(arguments).decode()
    except (RecursionError, UnicodeEncodeError) as fault:
        raise field_error(f"{path}.input", "cannot be written as JSON") from fault
    function = {"name": name, "arguments": text}
    return {"id": _id(block, "id", path), "type": "function", "function": function}


def _result_text(content: Any, path: str) -> str:
    """Returns the text of a tool's result. A reference to a tool is its name, and images and documents are notes."""
    if isinstance(content, str):
        return content
    return "\n".join(_result_part(block, f"{path}[{index}]") for index, block in enumerate(_blocks(content, path)))


def _result_part(block: dict[str, Any], path: str) -> str:
    match _type_of(block, path, _RESULT_BLOCKS):
        case "text":
            return _string(block, "text", path)
        case "tool_reference":
            return f"[tool: {_string(block, 'tool_name', path)}]"
        case kind:
            return f"[{kind}: not shown, because the model reads text only]"


def ignored_blocks(messages: list[Any]) -> tuple[str, ...]:
    """Returns the types of the blocks in results of tools that the model does not see. Expects checked messages."""
    contents = (message["content"] for message in messages if isinstance(message["content"], list))
    results = (block.get("content") for content in contents for block in content if block["type"] == "tool_result")
    kinds = {part["type"] for result in results if isinstance(result, list) for part in result}
    return tuple(f"tool_result.{kind}" for kind in _UNREADABLE_BLOCKS if kind in kinds)


def _text_of(content: Any, path: str) -> str:
    """Returns the text of a string, or of a list of text blocks."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, block in enumerate(_blocks(content, path)):
        block_path = f"{path}[{index}]"
        _type_of(block, block_path, ("text",))
        texts.append(_string(block, "text", block_path))
    return "\n".join(texts)


def _blocks(content: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not content:
        raise field_error(path, "is required: a string, or a list of content blocks that is not empty")
    if len(content) > MAX_BLOCKS:
        raise field_error(path, f"at most {MAX_BLOCKS} content blocks, got {len(content)}")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise field_error(f"{path}[{index}]", f"must be a content block, got {short_repr(block)}")
    return content


def _type_of(block: dict[str, Any], path: str, allowed: tuple[str, ...]) -> str:
    kind = block.get("type")
    if kind in allowed:
        return kind
    names = " and ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
    if kind in ("image", "document"):
        raise field_error(f"{path}.type", f"this server reads text only: {kind} blocks are not supported")
    raise field_error(f"{path}.type", f"only {names} blocks are supported here, got {short_repr(kind)}")


def _string(block: dict[str, Any], name: str, path: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise field_error(f"{path}.{name}", "is required: a string")
    return text


def _id(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CALL_ID_LENGTH:
        raise field_error(f"{path}.{name}", f"is required: a string of 1 to {MAX_CALL_ID_LENGTH} characters")
    return value
