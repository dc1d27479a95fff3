"""Write a page of measured results from benchmark runs, or from the stored results.

    python -m benchmarks memory --json > memory.out          optionally --parts swap,beam
    python -m docs.make_page memory memory.out               needs the dependency group bench
    python -m docs.make_page memory                          from docs/results/memory.json alone

The last line of each file is a run. If several files are given, parts of later files replace those
of earlier files, and versions and hardware are those of the last run. The runs are stored without
their repeats in docs/results/NAME.json. `roofline` takes runs of `python -m benchmarks roofline
--json`, whose cells are merged, and of `python -m benchmarks throughput --json`. `demo` takes one
run of `quire demo --json`, which has no page. `peers` draws the README's chart too.
"""

import json
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.measured_page import (
    MeasuredPage,
    Run,
    last_line,
    store,
    write_measured_page,
)
from benchmarks.common.rendering import environment
from benchmarks.peers.chart import bars, chart_svg
from benchmarks.roofline.measured import Cell, claims_of
from benchmarks.roofline.page import roofline_from, shares_svg, values
from quire.kernels.native.library import INSTRUCTION_SETS
from quire.models.loader import WEIGHT_CODECS

DOCS = Path(__file__).resolve().parent
TEMPLATES = environment(DOCS / "templates")
LISTED: dict[str, Any] = tomllib.loads((DOCS / "templates" / "pages.toml").read_text("utf-8"))
ROOFLINE = LISTED.pop("roofline")
PAGES = {name: MeasuredPage(**listed) for name, listed in LISTED.items()}
DEMO = Path("results", "demo.json")


def main(arguments: Sequence[str], docs: Path = DOCS) -> None:
    """Store the given runs, if any, and write the page."""
    parser = ArgumentParser(prog="python -m docs.make_page")
    parser.add_argument("name", choices=[*PAGES, "roofline", "demo"])
    parser.add_argument("outputs", nargs="*", type=Path, help="outputs of benchmarks")
    chosen = parser.parse_args(arguments)
    runs = [last_line(path) for path in chosen.outputs]
    if chosen.name == "roofline":
        write_roofline(runs, docs)
    elif chosen.name == "demo":
        for run in runs:
            store({key: value for key, value in run.items() if key != "arms"}, docs / DEMO)
    else:
        write_measured_page(chosen.name, PAGES[chosen.name], runs, docs, TEMPLATES)
        if chosen.name == "peers" and (found := bars(read_run(docs / "results" / "peers.json"))):
            (docs / "images" / "engines.svg").write_bytes(chart_svg(found))


def write_roofline(runs: Sequence[Run], docs: Path) -> None:
    """Store the runs of the benchmarks `roofline` and `throughput`; write the page and its charts.

    Cells of a later run replace the same cells of an earlier one. Rounds are not stored.
    """
    stored, total = (docs / "results" / f"{name}.json" for name in ("roofline", "throughput"))
    for run in runs:
        if run["name"] == "bench throughput":
            store(run | {"arms": {}}, total)
        else:
            store(with_cells(stored, run), stored)
    run = json.loads(stored.read_text(encoding="utf-8"))
    cells = roofline_from(run).cells
    (docs / "images" / "roofline.svg").write_text(shares_svg(cells), encoding="utf-8")
    (docs / "roofline.md").write_text(roofline_page(run, read_run(total)), encoding="utf-8")


def with_cells(stored: Path, run: Run) -> Run:
    """Add the stored cells to a run, in the order of the page; recompute the claims."""
    before = read_run(stored)
    cells = {} if before is None else {_key(cell): cell for cell in before["arms"]["cells"]}
    cells |= {_key(cell): cell for cell in run["arms"]["cells"]}
    ordered = sorted(cells.values(), key=_order)
    claims = claims_of(Cell.from_json(cell) for cell in ordered)
    refused = [asdict(refused) for refused in claims.refused]
    arms = {"cells": ordered, "refused": refused}
    return run | {"claims": dict(claims.values), "arms": arms}


def _order(cell: Mapping[str, Any]) -> tuple[object, ...]:
    """The highest instruction set first; then native, and weights as stored, before others."""
    return (
        INSTRUCTION_SETS[::-1].index(cell["instruction_set"]),
        cell["model"] != "125m",
        cell["implementation"],
        WEIGHT_CODECS.index(cell["weight_codec"]),
        cell["kv_codec"] != "none",
    )


def _key(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return Cell.from_json(cell).key


def read_run(stored: Path) -> Run | None:
    """A stored run; None if there is none."""
    if not stored.is_file():
        return None
    run: Run = json.loads(stored.read_text(encoding="utf-8"))
    return run


def roofline_page(run: Run, total: Run | None) -> str:
    """Render the page as Markdown.

    Args:
        run: of the benchmark `roofline`.
        total: of the benchmark `throughput`, or None.
    """
    claims, targets = {} if total is None else total["claims"], ROOFLINE["targets"]
    return TEMPLATES.get_template("roofline.md.j2").render(
        total=total,
        variants=variant_rows(claims),
        total_reached=[(f"`{n}`", f"{claims[n]:.3f}", targets[n]) for n in targets if n in claims],
        **values(roofline_from(run)),
    )


def variant_rows(claims: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Table rows of the variants that ran."""
    return [
        (
            words,
            f"{claims[f'{name}_total_s']:.2f}",
            f"{claims[f'{name}_prefill_s']:.2f}",
            f"{claims[f'{name}_decode_step_s'] * 1e3:.1f}",
            f"{claims[f'{name}_tokens_per_s']:,.0f}",
            f"{claims[f'{name}_kv_bytes'] / 1e6:,.1f}",
            f"{claims[f'{name}_mean_regret']:.4f}",
        )
        for name, words in ROOFLINE["variants"].items()
        if f"{name}_total_s" in claims
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
