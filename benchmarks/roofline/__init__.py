"""Benchmark `roofline`: time of a step by component, and its least time on this machine."""
