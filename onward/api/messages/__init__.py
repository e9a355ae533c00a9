"""`/v1/messages`: Anthropic's Messages API, on the pipeline that serves chats."""
