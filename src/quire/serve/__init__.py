"""The HTTP service: OpenAI's completions and chat over one engine."""
