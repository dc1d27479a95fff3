"""Preemption: victims, and swap or recomputation of their KV."""
