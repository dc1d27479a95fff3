from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with few cases that hold every pair of values of two parameters."""
    of_parameters = [list(one) for one in values.values()]
    cases = list(product(*(range(len(one)) for one in of_parameters)))
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        case = max(cases, key=lambda one: len(missing.intersection(_pairs(one))))
        missing.difference_update(_pairs(case))
        chosen.append([one[i] for one, i in zip(of_parameters, case, strict=True)])
    return pytest.mark.parametrize(tuple(values), chosen)


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(case), 2))
