"""Who may enter the KV memory: one rule a file, found by name."""
