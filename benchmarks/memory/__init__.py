"""The memory bench: what KV memory costs and saves, one table after the other."""
