"""Codecs: vectors to the planes of a page and back, one rule a file, found by being here."""
