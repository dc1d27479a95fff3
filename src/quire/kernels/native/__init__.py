"""Attention over pages in C: optional, built at install, selected by CPU features."""
