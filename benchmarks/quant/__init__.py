"""Measures what codes of KV cost and save: bytes, time, quality."""
