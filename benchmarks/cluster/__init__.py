"""Benchmark `cluster`: replicas behind a router, simulated with recorded requests."""
