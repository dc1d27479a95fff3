"""Groups of numbers on a line: the best there are, found exactly, so that equal runs agree."""

from collections.abc import Sequence
from functools import cache


def highest_cluster(numbers: Sequence[float], groups: int) -> frozenset[int]:
    """The group with the highest numbers, of the groups that are tightest.

    k-means on a line has an optimum that can be found: groups are neighbours in order, and the sum
    of squared distances from their means is smallest. Of equally good groupings the one whose
    highest group is larger.

    Args:
        numbers: in any order.
        groups: wanted; fewer where there are fewer different numbers.

    Returns:
        Places of its members in `numbers`; all where all numbers are equal.
    """
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))
    ranked = [numbers[i] for i in order]

    @cache
    def spread(start: int, end: int) -> float:
        mean = sum(ranked[start:end]) / (end - start)
        return sum((number - mean) ** 2 for number in ranked[start:end])

    @cache
    def tightest(end: int, parts: int) -> tuple[float, int]:
        """Cost of the first `end` numbers in `parts` groups, and where the last of these starts."""
        if parts == 1:
            return spread(0, end), 0
        return min(
            (tightest(start, parts - 1)[0] + spread(start, end), start)
            for start in range(parts - 1, end)
        )

    parts = min(groups, len(set(numbers)))
    return frozenset(order[tightest(len(ranked), parts)[1] :])
