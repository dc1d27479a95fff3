"""Measures what this machine and a model on it can do."""
