"""Offload of KV and weights: stores in CPU memory and on disk, transfers, rates and timelines.

`kv` offloads the oldest pages of running requests, `prefix_store` cached prefixes, `swap` preempted
requests, and `weights` decoder layers. `recompute` computes KV from stored activations. `tiers` are
byte stores. A timeline records when the transfers and products of a step ran; the profiler learns
rates from it. This package does not depend on the engine.
"""
