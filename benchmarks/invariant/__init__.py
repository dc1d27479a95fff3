"""Cost of `--batch-invariant`."""
