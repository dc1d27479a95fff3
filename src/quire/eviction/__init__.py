"""Eviction at run time: the rule of each request, its execution and its statistics."""
