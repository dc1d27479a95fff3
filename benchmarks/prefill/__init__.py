"""Prefill times by token budget of a step."""
