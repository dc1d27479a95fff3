"""KV that is not on the device: what moves when, who moves it, how fast, and where it rests.

A schedule is data. The planner makes it, executors carry it out: on a clock of its own, on threads
with a link that is as slow as asked for, on CUDA streams. Knows no requests and no engine.
"""
