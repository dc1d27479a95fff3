"""Eviction rules beside each other: what they keep, what that is worth, what it costs."""
