"""Tensor functions without state."""
