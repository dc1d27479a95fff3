"""Attention over unquantized pages by FlashInfer, an optional package, on a GPU."""
