"""Schedules of a decode step with offloaded KV: layers, transfers and recompute over streams.

`planner` arranges a step as operations on lanes (a lane is a stream or a queue); executors run a
schedule on threads with a throttled link, on CUDA streams, or on a virtual clock.

The engine plans no such schedule: benchmarks and tests compare these schedules with the formulas.
"""
