"""Requests from a file: the format of its lines and of their records."""
