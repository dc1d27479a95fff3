"""Weight offload: decoder layers in CPU memory or a file, prefetched while others compute."""
