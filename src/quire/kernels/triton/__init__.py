"""Attention over pages in Triton: for GPUs, and for CPUs in Triton's interpreter (tests)."""
