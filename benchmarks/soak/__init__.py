"""Resident memory while requests come and go."""
