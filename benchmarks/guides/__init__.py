"""Figures of the guides: small measurements that are no benchmarks."""
