"""One optimization of KV memory on top of another, in the same bytes."""
