"""Simulation of recorded requests by the engine's scheduler and memory, with computed times."""
