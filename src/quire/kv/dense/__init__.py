"""Dense KV of a batch, padded to its longest row, for attention without pages."""
