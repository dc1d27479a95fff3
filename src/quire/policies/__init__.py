"""Eviction policies: one rule per module, registered when the package is scanned."""
