"""Swap space: the KV of preempted requests in CPU memory."""
