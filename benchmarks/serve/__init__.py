"""Tokens per second of the server over those of the offline engine."""
