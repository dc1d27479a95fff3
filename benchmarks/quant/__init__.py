"""`python -m benchmarks quant`: costs and savings of KV codecs: bytes and time."""
