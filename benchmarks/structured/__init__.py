"""Benchmark of libraries for structured output: compile time and time of a token mask."""
