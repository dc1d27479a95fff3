"""Quire and other CPU engines on equal work, each engine in its own environment and process."""
