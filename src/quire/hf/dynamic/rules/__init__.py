"""How a batch changes: one rule a file, found by name. No tensors."""
