"""The public entry points LLM and AsyncLLM, and checks of their arguments."""
