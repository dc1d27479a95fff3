"""What a model is and how many bytes its KV takes: plain arithmetic, no tensors."""
