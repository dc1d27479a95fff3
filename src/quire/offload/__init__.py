"""Offload of KV and weights: stores in CPU memory and on disk, transfers, rates and splits.

`kv` offloads the oldest pages of running requests, `prefix_store` cached prefixes, `swap` preempted
requests, and `weights` decoder layers. `recompute` computes KV from stored activations. `tiers` are
byte stores. `split` chooses what is recomputed while the rest is loaded, by rates that it learns
from the operations of steps. This package does not depend on the engine.
"""
