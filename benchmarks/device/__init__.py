"""`python -m benchmarks device`: what KV outside the device costs, beside arithmetic."""
