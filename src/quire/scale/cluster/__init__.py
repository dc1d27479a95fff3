"""Simulation of several engines behind a router."""
