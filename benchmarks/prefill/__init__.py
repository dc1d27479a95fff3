"""Prefill times by tokens of a step."""
