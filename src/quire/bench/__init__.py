"""Benchmark of OpenAI-compatible servers: requests of a data set, their arrivals, and metrics."""
