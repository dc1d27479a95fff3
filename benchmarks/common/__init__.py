"""What several benchmarks share: models, prompts, results, tables, charts, pages."""
