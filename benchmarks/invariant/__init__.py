"""What `--batch-invariant` costs."""
