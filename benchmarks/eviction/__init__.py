"""Comparison of eviction rules: retained tokens, quality and cost."""
