"""Who carries a schedule out: a virtual clock, threads with a throttled link, CUDA streams."""
