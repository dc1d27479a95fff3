"""How pages are given to lanes: one strategy a file, found by name."""
