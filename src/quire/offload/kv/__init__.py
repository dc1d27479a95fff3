"""KV offload: pages of running sequences in CPU memory, prefetched layer by layer."""
