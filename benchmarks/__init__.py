"""Benchmarks behind the numbers of the documents; not part of the wheel."""
