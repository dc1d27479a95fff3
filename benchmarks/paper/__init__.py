"""`python -m benchmarks paper`: tables and figures of five papers, each beside Quire's values."""
