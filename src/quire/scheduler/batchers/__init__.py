"""How a batch changes, in pages and in dense rows: one rule a file, found by name."""
