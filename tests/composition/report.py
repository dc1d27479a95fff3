"""The committed results: counts of all pairs and triples, and each one that does not work."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from composition.cell import WORKS
from composition.features import FEATURES

PAIR = 2
Names = tuple[str, ...]


def results_of(
    pairs: Mapping[Names, Mapping[str, object]], triples: Mapping[Names, Mapping[str, object]]
) -> dict[str, object]:
    """Results as JSON values, from which the page is generated.

    Args:
        pairs: cells of all pairs, by the names of their features.
        triples: cells of the sampled triples.
    """
    return {
        "features": [
            {"name": f.name, "group": f.group, "option": f.option, "values_of": f.alone_in}
            for f in FEATURES
        ],
        "pairs": counts(pairs.values()),
        "triples": counts(triples.values()),
        "by_group": _by_group(pairs),
        "worst_difference": _worst([*pairs.values(), *triples.values()]),
        "with_values": [
            {name: c[name] for name in ("features", "used")}
            for c in pairs.values()
            if c["result"] == WORKS and c.get("used")
        ],
        "others": [_other(c) for c in [*pairs.values(), *triples.values()] if c["result"] != WORKS],
    }


def with_triples(
    results: Mapping[str, Any], triples: Mapping[Names, Mapping[str, object]]
) -> dict[str, Any]:
    """Results whose triples are replaced.

    Args:
        results: results of `results_of`.
        triples: cells of the sampled triples.
    """
    others = [cell for cell in results["others"] if len(cell["features"]) == PAIR]
    others += [_other(c) for c in triples.values() if c["result"] != WORKS]
    worst = max(results["worst_difference"], _worst(triples.values()))
    new = {"triples": counts(triples.values()), "worst_difference": worst, "others": others}
    return {**results, **new}


def counts(cells: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Number of cells of each result, and the share that works."""
    found = Counter(str(cell["result"]) for cell in cells)
    total = sum(found.values())
    share = round(found[WORKS] / max(1, total), 4)
    return {"cells": total, **dict(sorted(found.items())), "works_share": share}


def _by_group(pairs: Mapping[Names, Mapping[str, object]]) -> dict[str, dict[str, list[int]]]:
    """Working pairs and all pairs of each two groups, in the order of the registry."""
    group = {feature.name: feature.group for feature in FEATURES}
    found: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for (one, other), cell in pairs.items():
        count = found[group[one]].setdefault(group[other], [0, 0])
        count[0] += cell["result"] == WORKS
        count[1] += 1
    return dict(found)


def _worst(cells: Iterable[Mapping[str, object]]) -> float:
    """Largest difference of logits of a working cell, without cells that approximate."""
    return max((float(str(c["worst"])) for c in cells if c["result"] == WORKS), default=0.0)


def _other(cell: Mapping[str, object]) -> dict[str, object]:
    return {name: cell[name] for name in ("features", "result", "why")}
