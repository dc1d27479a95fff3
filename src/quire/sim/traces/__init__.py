"""Traces of recorded requests, for simulations."""
