"""Code shared by several benchmarks: models, prompts, results, tables, charts, pages."""
