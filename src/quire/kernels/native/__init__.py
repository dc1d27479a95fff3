"""Attention over pages in C: optional, built at install, chosen by CPU features."""
