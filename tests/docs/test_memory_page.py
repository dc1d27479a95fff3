"""docs/make_page.py memory: a page from runs, and again from the stored results."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.common.result import Chart, PartResult, Table
from support.measured_pages import load_maker


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def run_object(**parts: PartResult) -> dict[str, Any]:
    return {
        "claims": {},
        "arms": {name: part.to_json() for name, part in parts.items()},
        "config": {"threads": 2},
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "quire": "0.1.0"},
        "commit": "abc",
    }


def part(ratio: float) -> PartResult:
    table = Table(name="beam", caption="Beams.", columns=("course", "ratio"), rows=(("a", ratio),))
    lines = {"one": ((1, 2.0), (2, 3.0)), "other": ((1, 4.0), (2, 5.0))}
    chart = Chart(name="beam", title="Peaks", x_label="x", y_label="y", lines=lines, log_x=True)
    return PartResult(
        claims={"beam4_memory_ratio": ratio}, tables=(table,), charts=(chart,), raw={"a": [1]}
    )


def test_runs_are_written_as_page_images_and_stored_results(maker: ModuleType, tmp_path: Path):
    """The second run replaces its part; the other part of the first run is retained."""
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    first = run_object(beam=part(1.5), waste=PartResult(claims={"waste": 1}, tables=()))
    for name, run in (("a", first), ("b", run_object(beam=part(1.25)))):
        (tmp_path / name).write_text("some words\n" + json.dumps(run) + "\n")

    maker.main(["memory", str(tmp_path / "a"), str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "memory-measured.md").read_text()
    assert "| `beam4_memory_ratio` | 1.25 | at most 1.10 |" in text
    assert "| a | 1.25 |" in text
    assert "![Peaks](images/measured-beam.svg)" in text
    assert "<svg" in (tmp_path / "images" / "measured-beam.svg").read_text()
    stored = json.loads((tmp_path / "results" / "memory.json").read_text())
    assert stored["claims"] == {"beam4_memory_ratio": 1.25, "waste": 1}
    assert "raw" not in stored["arms"]["beam"]

    (tmp_path / "memory-measured.md").unlink()
    maker.main(["memory"], tmp_path)
    assert (tmp_path / "memory-measured.md").read_text() == text
