"""Whole tokens from fractions of them, the total kept: the largest fractions are rounded up."""

from collections.abc import Sequence
from fractions import Fraction


def share_out(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Divide whole tokens in proportion to weights.

    Each gets its share rounded down; what is left goes, one each, to those who lost most by that.

        share_out(10, [3, 2, 1]): shares 5, 3 1/3, 1 2/3; down 5, 3, 1; one left, to 2/3: 5, 3, 2

    Args:
        total: tokens.
        weights: none negative, not all zero.

    Returns:
        As many numbers as weights, `total` together; of equal fractions the first is rounded up.
    """
    of_all = sum(weights)
    shares = [Fraction(total * weight) / of_all for weight in weights]
    whole = [int(share) for share in shares]
    by_loss = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    for i in by_loss[: total - sum(whole)]:
        whole[i] += 1
    return whole


def decimal_fraction(number: float) -> Fraction:
    """The number as it is written: 0.2 is 1/5, not the nearest binary fraction."""
    return Fraction(repr(number))
