"""Workloads that measure Quire, each one command with a JSON object as its last line."""
