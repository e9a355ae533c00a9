"""`/v1/responses`: OpenAI's newer form of a chat, as a view of the machinery that serves the older one."""
