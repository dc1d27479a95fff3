"""Options: frozen dataclasses that are parsed and checked once."""
