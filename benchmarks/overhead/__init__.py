"""The share of a decode step that is bookkeeping."""
