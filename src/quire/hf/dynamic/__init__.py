"""A running batch of any Transformers model that queries enter and leave at every step."""
