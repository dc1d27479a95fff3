"""Batches that change while they run, compared with static batches: makespan, latency, memory."""
