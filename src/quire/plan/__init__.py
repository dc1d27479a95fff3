"""Arithmetic ahead of time: where memory goes, how much fits, what a step reads. No tensors."""
