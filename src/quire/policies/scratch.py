"""Bounds what a rule takes beside the cache: lanes are worked on a few at a time."""

from collections.abc import Iterator

SCRATCH_NUMBERS = 1 << 22
"""float32 numbers of the largest tensor a rule makes where it can: 16 MiB."""


def slices(parts: int, numbers: int) -> Iterator[slice]:
    """Cut `parts` lanes (or blocks) into runs that fit, one at least.

    What is computed for a lane does not depend on which lanes run with it.

    Args:
        parts: how many there are.
        numbers: float32 numbers that one takes.
    """
    at_once = max(1, SCRATCH_NUMBERS // max(1, numbers))
    for start in range(0, parts, at_once):
        yield slice(start, start + at_once)
