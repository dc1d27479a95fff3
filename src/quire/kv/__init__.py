"""The KV memory: one arena of fixed bytes, pages, tables, and the tensors they describe."""
