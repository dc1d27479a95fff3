"""Measures rates of this machine and of a model on it."""
