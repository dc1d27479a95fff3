"""Growth of resident memory under continuous load."""
