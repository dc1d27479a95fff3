"""Quire and Transformers on the same prompts, compared with the measured machine limits."""
