"""Schedules of a decode step with offloaded KV: layers, transfers, recomputation over streams.

`planner` lays a step out as operations on lanes (a lane is a stream); executors run such a schedule
on threads with a throttled link, on CUDA streams, or on a virtual clock.

The engine plans no such schedule: benchmarks and tests run these against the formulas.
"""
