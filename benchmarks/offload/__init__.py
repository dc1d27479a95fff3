"""`python -m benchmarks offload`: variants of a decode step with KV in host memory."""
