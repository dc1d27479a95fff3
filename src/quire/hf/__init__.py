"""Quire's KV memory and eviction rules inside Transformers: a cache, and dynamic batches."""

from quire.hf.cache import QuireCache
from quire.hf.dynamic.batch import DynamicBatch

__all__ = ["DynamicBatch", "QuireCache"]
