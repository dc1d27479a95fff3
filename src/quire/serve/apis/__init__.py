"""Other chat APIs over the same chats: OpenAI's /v1/responses and Anthropic's /v1/messages."""
