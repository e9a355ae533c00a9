"""Ollama's API: its requests are converted to requests of OpenAI's API, and the answers back.

Both conversions are at the edge of the process that the client is connected to, an instance or a router. Everything below
handles a chat, a completion or an embedding, so streams continue after failures as those of these endpoints do.
"""
