"""Run the items of a paper, store every finished one, and write tables and the result as JSON.

A folder has one file per item. A later run with the same options and the same commit reads it
instead of measuring the item again.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.common.result import Cell, PartResult, Table
from benchmarks.paper.item import Item, ItemResult, Row, compare
from benchmarks.paper.material import Material
from benchmarks.paper.papers import Paper
from quire.cli.report import write_files

Options = Mapping[str, object]


class ItemFiles:
    """Finished items in a folder.

    Args:
        folder: an existing folder; None: nothing is stored.
        paper: number of the paper.
        options: options and commit that a stored item must have.
    """

    def __init__(self, folder: Path | None, paper: str, options: Options) -> None:
        self._folder, self._paper = folder, paper
        self._options = json.loads(json.dumps(options))

    def read(self, item: str) -> ItemResult | None:
        """A finished item of the same options; None: there is none."""
        if self._folder is None:
            return None
        try:
            stored = json.loads((self._folder / self._name(item)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = isinstance(stored, dict) and stored.get("options") == self._options
        return ItemResult.from_json(stored["result"]) if same else None

    def add(self, result: ItemResult) -> None:
        """Store a finished item atomically."""
        if self._folder is not None:
            stored = {"options": self._options, "result": result.to_json()}
            write_files(self._folder, {self._name(result.id): (json.dumps(stored) + "\n").encode()})

    def _name(self, item: str) -> str:
        return f"paper-{self._paper}-{item}.json"


def run_items(
    items: Sequence[Item],
    material: Material,
    files: ItemFiles,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[ItemResult]:
    """Yield the result of each item; stored items are not measured again.

    Args:
        items: selected items, in run order.
        material: inputs of the items.
        files: finished items.
        clock: clock in seconds.
    """
    for item in items:
        result = files.read(item.id)
        if result is None:
            started_s = clock()
            measured = item.measure(material)
            result = compare(item, measured, clock() - started_s)
            files.add(result)
        yield result


def part_of(paper: str, result: ItemResult) -> PartResult:
    """An item as a part of a benchmark: its rows, the reasons of their marks, its other tables."""
    name = f"paper-{paper}-{result.id}"
    more = [replace(found, name=f"{name}-{found.name}") for found in result.more.tables]
    charts = (replace(found, name=f"{name}-{found.name}") for found in result.more.charts)
    return PartResult(
        claims={},
        tables=(*_tables(name, result), *more),
        charts=tuple(charts),
        raw={"rows": [asdict(row) for row in result.rows]},
        seconds=result.seconds,
    )


def _tables(name: str, result: ItemResult) -> tuple[Table, Table]:
    """Rows with the numbers of their reasons, and the reasons."""
    reasons = {
        text: number
        for number, text in enumerate(dict.fromkeys(row.reason for row in result.rows), 1)
    }
    sides = [f"{column}, {side}" for column in result.columns for side in ("paper", "here")]
    rows = Table(
        name=name,
        caption=f"{result.title}. The paper: {result.setting}.",
        columns=("row", *sides, "mark", "reason"),
        rows=tuple((*_cells(result, row), reasons[row.reason]) for row in result.rows),
    )
    listed = Table(
        name=f"{name}-reasons",
        caption=f"Reasons of the marks of {result.id}.",
        columns=("reason", "text"),
        rows=tuple((number, text) for text, number in reasons.items()),
    )
    return rows, listed


def _cells(result: ItemResult, row: Row) -> tuple[Cell, ...]:
    none = (None,) * len(result.columns)
    pairs = zip(row.paper or none, row.ours or none, strict=True)
    return (row.label, *(cell for pair in pairs for cell in pair), row.status)


def counts_of(results: Sequence[ItemResult]) -> dict[str, int]:
    """Rows of all items by mark, as claims."""
    found: dict[str, int] = {}
    for result in results:
        for status, count in result.counts.items():
            name = f"rows_{status.replace(' ', '_')}"
            found[name] = found.get(name, 0) + count
    return found


def items_table(paper: Paper) -> Table:
    """The list of a paper's items, for `--list`."""
    return Table(
        name=f"paper-{paper.id}",
        caption=f"Paper {paper.id}: {paper.title}",
        columns=("item", "title", "mark of a full run", "reason"),
        rows=tuple((item.id, item.title, item.status, item.reason) for item in paper.items),
    )
