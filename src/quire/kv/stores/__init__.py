"""KV stores: strategies that allocate pages to lanes, one per file, found by name."""
