"""Quire's KV memory and eviction rules inside Transformers: a cache for `model.generate`."""

from quire.hf.cache import QuireCache

__all__ = ["QuireCache"]
