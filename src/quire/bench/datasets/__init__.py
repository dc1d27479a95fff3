"""Data sets of `quire bench serve`, one per module."""
