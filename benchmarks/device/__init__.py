"""`python -m benchmarks device`: measured and expected cost of KV in host memory."""
