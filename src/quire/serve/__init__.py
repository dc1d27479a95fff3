"""The HTTP server: OpenAI-compatible completions and chat completions over one engine."""
