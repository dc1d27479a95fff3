"""Fraction of a decode step spent on bookkeeping."""
