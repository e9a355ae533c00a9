"""Paths of Ollama's API, and the version of the API that these routes follow."""

PREFIX = "/api/"
CHAT_PATH = PREFIX + "chat"
GENERATE_PATH = PREFIX + "generate"
EMBED_PATH = PREFIX + "embed"
TAGS_PATH = PREFIX + "tags"
SHOW_PATH = PREFIX + "show"
PS_PATH = PREFIX + "ps"
VERSION_PATH = PREFIX + "version"
API_VERSION = "0.12.11"
"""Clients compare this with the version of Ollama that they need: the last one whose fields are read here."""


def is_ollama_path(path: str) -> bool:
    return path.startswith(PREFIX)
