"""Confidence intervals of shares."""

import math

Z_95 = 1.959964  # two-sided, 95 %


def wilson(hits: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share: where the true one lies in 95 of 100 such draws.

    Args:
        hits: of `n`; n > 0.
        n: draws.
        z: quantile of the normal distribution.

    Returns:
        Lower and upper end, inside [0, 1].

    Source: Wilson 1927: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    share, squared = hits / n, z * z
    middle = share + squared / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + squared / (4 * n * n))
    whole = 1 + squared / n
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)
