"""What benchmarks print last, and what the pages are written from."""

import json
from pathlib import Path

from benchmarks.__main__ import app
from benchmarks.common.result import Chart, PartResult, Table
from golden.cases import case
from golden.stored import stored
from golden.workshop import Workshop


@case()
def benchmark_invariant(workshop: Workshop) -> object:
    return workshop.run("invariant", "--quick", "--threads=1", of=app)


_RESULT = PartResult(
    claims={"a": 1.5},
    tables=(Table(name="t", caption="c", columns=("x", "y"), rows=(("a", 1), ("b", None))),),
    charts=(
        Chart(name="c", title="T", x_label="x", y_label="y", lines={"a": ((1, 2.5),)}, log_y=True),
    ),
    raw={"repeats": [1, 2]},
    seconds=2.5,
)


def _describe_result(folder: Path) -> object:
    return json.loads((folder / "part.json").read_text(encoding="utf-8"))


def _read_result(workshop: Workshop, folder: Path) -> object:
    found = PartResult.from_json(_describe_result(folder))
    assert found == _RESULT
    return {"charts": [chart.name for chart in found.charts]}


@stored(_describe_result, _read_result, exact=("*",))
def benchmark_part(workshop: Workshop, folder: Path) -> None:
    """A part with everything that may be in it."""
    (folder / "part.json").write_text(json.dumps(_RESULT.to_json(), indent=1), encoding="utf-8")
