"""Giving way: who, and what becomes of the KV."""
