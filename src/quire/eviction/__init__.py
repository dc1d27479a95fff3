"""Eviction at run time: from a spec to each request's rule, its execution and its statistics."""
