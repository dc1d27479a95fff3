"""Codecs encode vectors to the planes of a page and decode them; one codec family per module."""
