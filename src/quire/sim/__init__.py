"""The engine's scheduler and memory on recorded requests: a timing model instead of a model."""
