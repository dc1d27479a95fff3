"""Prefill and decode in two processes that share a store of prefixes."""
