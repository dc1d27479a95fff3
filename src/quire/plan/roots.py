"""Where a quadratic cost meets a linear one."""

import math


def positive_root(square: int | float, linear: int | float, constant: int | float) -> float:
    """The largest root of square * n^2 + linear * n = constant.

    In the form that loses no digits where `square` is small.

    Args:
        square: 0 or more.
        linear: any.
        constant: 0 or more; less where there is a root all the same.

    Returns:
        Infinity where the left side never reaches the constant.
    """
    if not square:
        return constant / linear if linear > 0 else math.inf
    root = math.sqrt(linear**2 + 4 * square * constant)
    if linear > 0:
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * square)
