"""What benchmarks print last, and what they keep between runs."""

import json
from pathlib import Path

from benchmarks.__main__ import app
from benchmarks.common.result import Chart, HeatMap, PartResult, Table
from benchmarks.quality.cells import Cell, CellFile, CellKey
from golden.cases import case
from golden.stored import stored
from golden.workshop import Workshop


@case()
def benchmark_invariant(workshop: Workshop) -> object:
    return workshop.run("invariant", "--quick", "--threads=1", of=app)


_CELL = Cell(
    key=CellKey(
        model="quire-tiny",
        task="lines",
        tokens=256,
        prompts=4,
        rule="h2o",
        when="decode",
        budget=0.25,
        evict="h2o:cap=64",
        commit="abc",
    ),
    hits=3,
    old_hits=1,
    old_prompts=2,
    request_bytes=1024.0,
    seconds=1.5,
    outcomes="1101",
)


def _describe_cells(folder: Path) -> object:
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _read_cells(workshop: Workshop, folder: Path) -> object:
    found = CellFile(folder / "cells.jsonl").read()
    assert found == {_CELL.key: _CELL}, "a cell that is not read is measured again, without a word"
    return {"cells": len(found)}


@stored(_describe_cells, _read_cells, exact=("*",))
def eviction_cells(workshop: Workshop, folder: Path) -> None:
    """One finished cell."""
    CellFile(folder / "cells.jsonl").add(_CELL)


_RESULT = PartResult(
    claims={"a": 1.5},
    tables=(Table(name="t", caption="c", columns=("x", "y"), rows=(("a", 1), ("b", None))),),
    charts=(
        Chart(name="c", title="T", x_label="x", y_label="y", lines={"a": ((1, 2.5),)}, log_y=True),
    ),
    maps=(HeatMap(name="m", title="T", x_label="x", y_label="y", panels={"p": ((0.0, 1.0),)}),),
    raw={"repeats": [1, 2]},
    seconds=2.5,
)


def _describe_result(folder: Path) -> object:
    return json.loads((folder / "part.json").read_text(encoding="utf-8"))


def _read_result(workshop: Workshop, folder: Path) -> object:
    found = PartResult.from_json(_describe_result(folder))
    assert found == _RESULT
    return {"pictures": [picture.name for picture in found.pictures]}


@stored(_describe_result, _read_result, exact=("*",))
def benchmark_part(workshop: Workshop, folder: Path) -> None:
    """A part with everything that may be in it."""
    (folder / "part.json").write_text(json.dumps(_RESULT.to_json(), indent=1), encoding="utf-8")
