"""KV of a batch side by side, padded to its longest row: a store for attention without pages."""
