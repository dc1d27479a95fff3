"""Batch-Max's comparison: full KV, decode-only eviction and eviction during prefill."""
