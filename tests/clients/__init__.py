"""Unmodified clients against `quire serve`: `python -m tests.clients`.

Each client has its own environment, because their requirements conflict. It is a script of
`tests/clients/scripts`, which gets the URL of a server and prints one line per check, or a program
with its own command line (`tests/clients/programs.py`).
"""
