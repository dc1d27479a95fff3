"""Requests, scheduling, sampling and the runner: what turns prompts into answers."""
