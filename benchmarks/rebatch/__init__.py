"""Batches that change while they run, beside batches that do not: makespan, latency, memory."""
