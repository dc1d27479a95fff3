"""Eviction policies: one rule a file, found by being here."""
