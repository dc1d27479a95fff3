"""Batching rules for paged KV and for dense rows: one rule per file, selected by name."""
