"""KV and weights that are not on the device: what moves when, how fast, and where it rests.

`kv` offloads the oldest pages of running requests, `prefix_store` cached prefixes, `swap` preempted
requests, `weights` layers of the model; `recompute` makes KV from stored activations, `tiers` hold
bytes. A timeline says when a step's transfers and products ran, the profiler learns rates from it.
Knows no requests and no engine.
"""
