"""One script per engine: reads a job as JSON, runs it, and prints its result as a JSON line.

The scripts run in the environments of the engines. They import `protocol` and nothing else of this
repository; only the script of Quire imports quire.
"""
