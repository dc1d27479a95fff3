"""Executors of the schedules of `quire.offload.schedule`: throttled threads and CUDA streams.

They run whole steps without an engine. Benchmarks and tests compare their times with the formulas.
"""
