"""`python -m benchmarks memory`: costs and savings of KV memory management, part by part."""
