"""Generates docs/composition.md from the results of `python -m tests.composition`."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results/composition.json")
INTRODUCTION = """# Composition

The aim is that every feature of Quire works with every other one, or the combination is refused
with the reason. A schedule, granularity or budget of
evictions without a named rule takes the first of h2o, tova, keydiff, snapkv and sinks with which it
works: a pair is refused only if none does. Cells below that are inert or failed are open.
This page is generated from runs: `python -m tests.composition --size 2` runs all pairs of the
features below on tiny random models, and `--size 3` a sample of triples. Options of one text,
such as two codecs, exclude each other and are no pair.

A run **works** if all of this holds:

* Each feature acted. Counters show it: evicted tokens and their positions, pages in codes,
  preemptions of the kind, cached and loaded prefixes, offloaded bytes, recomputed and
  CPU-attended tokens, transferred weights, shared pages, the text of a structured output. A run
  in which a feature did not act is repeated in another memory size, and then with other values:
  [these pairs](#pairs-that-work-with-other-values) need them. If it never acts, the pair is
  reported as *inert*.
* Logits of the same tokens after the same evictions differ by at most 1e-4 (float32) from those
  of the requests in ample memory without batcher, preemption, offload, cached prefixes and tiers.
  With `--batch-invariant` they are equal bit for bit. Activations in codes change the
  mathematics: there the outputs are complete, and their values are not compared.
* Outputs are equal: tokens, reasons of their ends, log-probabilities. Outputs that differ because
  two logits are equal up to rounding are accepted only if runs in ample memory differ too.
* The memory accounts hold after every step, and nothing is held at the end.

"""


def page(root: Path) -> str:
    """The text of the page."""
    results = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    return INTRODUCTION + "\n".join(
        (
            _counts(results),
            _groups(results),
            _features(results),
            _reasons(results),
            _values(results),
        )
    )


def _counts(results: dict[str, Any]) -> str:
    columns = ("cells", "works", "refused", "inert", "failed")
    rows = [
        (name, *(f"{results[name].get(c, 0):,}" for c in columns), _percent(results[name]))
        for name in ("pairs", "triples")
    ]
    return _table(("", "run", *columns[1:], "share that works"), rows)


def _percent(counts: dict[str, Any]) -> str:
    return f"{100 * counts['works_share']:.1f} %"


def _groups(results: dict[str, Any]) -> str:
    """Working pairs of all pairs of each two groups."""
    names = list(dict.fromkeys(feature["group"] for feature in results["features"]))
    found = results["by_group"]
    rows = []
    for one in names:
        cells = [found.get(one, {}).get(other) or found.get(other, {}).get(one) for other in names]
        rows.append((one, *(_share(cell) for cell in cells)))
    heading = "## Pairs by group\n\nWorking pairs of all pairs.\n\n"
    return heading + _table(("", *names), rows)


def _share(cell: list[int] | None) -> str:
    return "" if cell is None else f"{cell[0]}/{cell[1]}"


def _features(results: dict[str, Any]) -> str:
    """Each feature, how it is set, and the features that it does not work with."""
    excluded = defaultdict(list)
    for cell in results["others"]:
        if len(cell["features"]) == 2:
            one, other = cell["features"]
            excluded[one].append(other)
            excluded[other].append(one)
    rows = [
        (f["group"], f["name"], f["option"], ", ".join(excluded[f["name"]]) or "all")
        for f in results["features"]
    ]
    rows = [(*row[:3], row[3] if row[3] == "all" else f"all but: {row[3]}") for row in rows]
    return "## Features\n\n" + _table(("group", "feature", "as in", "works with"), rows)


def _reasons(results: dict[str, Any]) -> str:
    """Each refusal with the message that a user reads."""
    rows = [
        (" + ".join(cell["features"]), cell["result"], " ".join(str(cell["why"]).split()))
        for cell in results["others"]
        if len(cell["features"]) == 2
    ]
    heading = "## Pairs that do not work\n\nA refusal quotes the message that a user reads.\n\n"
    return heading + _table(("features", "result", "reason"), rows)


def _values(results: dict[str, Any]) -> str:
    """Pairs that need other values than most, and the values."""
    rows = [(" + ".join(cell["features"]), cell["used"]) for cell in results["with_values"]]
    heading = (
        "## Pairs that work with other values\n\nThe first values that are tried do not let both "
        "features act, or are refused. Options of the command have their own names; `late_step`, "
        "`grows`, `short_tokens`, `host_units` and `tenants` describe the requests and the swap "
        "space of a run (`tests/composition/draft.py`).\n\n"
    )
    return heading + _table(("features", "values"), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
