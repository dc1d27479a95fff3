"""The scheduler: admission, batching, prefill, decode and preemption."""
