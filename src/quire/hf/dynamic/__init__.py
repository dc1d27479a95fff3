"""Continuous batching for any Transformers model: queries join and leave at every step."""
