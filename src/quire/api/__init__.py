"""The public entry points: LLM, AsyncLLM, and the inputs that they take."""
