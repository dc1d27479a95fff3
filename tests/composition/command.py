"""The command: single features, all pairs and sampled triples, in shards, resumable."""

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from composition.cell import WORKS, run_cell
from composition.features import FEATURES, Feature

# ---- results: counts of all pairs and triples, and each one that does not work -------------------

PAIR = 2
Names = tuple[str, ...]


def results_of(
    pairs: Mapping[Names, Mapping[str, object]], triples: Mapping[Names, Mapping[str, object]]
) -> dict[str, object]:
    """Results as JSON values, from which the page is generated."""
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
    """Results whose triples are replaced."""
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


# ---- command -------------------------------------------------------------------------------------

BY_NAME = {feature.name: feature for feature in FEATURES}
RESULTS = Path("docs/results/composition.json")
TRIPLES = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run combinations; the exit status is 1 where one failed or was inert."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    if asked.write is not None:
        return write(asked.write)
    wanted = _wanted(asked)
    index, _, count = asked.shard.partition("/")
    wanted = [names for i, names in enumerate(wanted) if i % int(count) == int(index)]
    done = read(asked.out)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + asked.limit_s
    for names in wanted:
        if time.monotonic() > end_s:
            break
        if names in done and not (asked.again and done[names]["result"] != WORKS):
            continue
        cell = run_cell([BY_NAME[name] for name in names]).as_dict()
        done[names] = cell
        with asked.out.open("a") as lines:
            lines.write(json.dumps(cell) + "\n")
        if cell["result"] in ("failed", "inert"):
            print(f"{' + '.join(names)}: {cell['result']} {str(cell['why'])[:300]}", flush=True)
    found = counts(done[names] for names in wanted if names in done)
    print(json.dumps(found))
    return int(bool(found.get("failed", 0) or found.get("inert", 0)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.composition", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/composition.jsonl"))
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="stop after this many seconds"
    )
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th combination from the I-th")
    parser.add_argument("--only", default="", help="names; combinations that have one of them")
    parser.add_argument("--size", type=int, default=2, help="1, 2 or 3 features together")
    parser.add_argument("--triples", type=int, default=TRIPLES, help="number of sampled triples")
    parser.add_argument("--again", action="store_true", help="repeat cells that did not work")
    parser.add_argument(
        "--write", nargs="*", type=Path, help="write docs/results/composition.json from these files"
    )
    parser.add_argument("--cell", default="", help="one combination: names separated by ' + '")
    return parser


def _wanted(asked: argparse.Namespace) -> list[Names]:
    if asked.cell:
        return [tuple(asked.cell.split(" + "))]
    found = {1: singles, 2: pairs, 3: lambda: triples(asked.triples)}[asked.size]()
    only = {name.strip() for name in asked.only.split(";") if name.strip()}
    return [names for names in found if not only or only & set(names)]


def singles() -> list[Names]:
    """Each feature alone."""
    return [(feature.name,) for feature in FEATURES]


def pairs() -> list[Names]:
    """All pairs of features that do not exclude each other."""
    return [(a.name, b.name) for a, b in combinations(FEATURES, 2) if not a.excludes(b)]


def triples(count: int) -> list[Names]:
    """A sample of combinations of three features: the same one every time."""
    rng, found = random.Random("three features"), dict[Names, None]()
    while len(found) < count:
        features = [FEATURES[i] for i in sorted(rng.sample(range(len(FEATURES)), 3))]
        if not any(a.excludes(b) for a, b in combinations(features, 2)):
            found[tuple(feature.name for feature in features)] = None
    return list(found)


def write(paths: Sequence[Path]) -> int:
    """Write the committed results from files of cells; 1 if a pair or a triple is missing.

    Files without a pair replace the results of the triples only.
    """
    done = {names: cell for path in paths for names, cell in read(path).items()}
    of_pairs, of_triples = (
        {n: done[n] for n in names if n in done} for names in (pairs(), triples(TRIPLES))
    )
    if of_pairs:
        results = results_of(of_pairs, of_triples)
        missing = len(pairs()) - len(of_pairs)
    else:
        results = with_triples(json.loads(RESULTS.read_text()), of_triples)
        missing = 0
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    missing += TRIPLES - len(of_triples)
    print(json.dumps({name: results[name] for name in ("pairs", "triples")}))
    print(f"{missing} combinations have not run")
    return int(missing > 0)


def read(path: Path) -> dict[Names, dict]:
    """Recorded cells, the newest of each combination."""
    found: dict[Names, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[tuple(cell["features"])] = cell
    return found


def chosen(names: Iterable[str]) -> list[Feature]:
    """Features by their names."""
    return [BY_NAME[name] for name in names]
