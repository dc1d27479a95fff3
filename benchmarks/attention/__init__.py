"""Rates of attention over pages."""
