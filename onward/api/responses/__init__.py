"""`/v1/responses`: OpenAI's Responses API, on the pipeline that serves chats."""
