"""docs/make_page.py eviction: one page from the runs of both benchmarks."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.common.result import HeatMap, PartResult, Table
from support.measured_pages import load_maker


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def run_object(bench: str, **parts: PartResult) -> dict[str, Any]:
    return {
        "name": f"bench {bench}",
        "claims": {},
        "arms": {name: part.to_json() for name, part in parts.items()},
        "config": {"threads": 2},
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "quire": "0.1.0"},
        "commit": "abc",
    }


def part(claim: str, value: float, *, maps: tuple[HeatMap, ...] = ()) -> PartResult:
    table = Table(name="t", caption=f"{claim}.", columns=("a", "b"), rows=(("r", value),))
    return PartResult(claims={claim: value}, tables=(table,), maps=maps, raw={"a": [1]})


def test_two_benchmarks_share_a_page(maker: ModuleType, tmp_path: Path):
    """Both have a part named quality: neither replaces the other."""
    pytest.importorskip("matplotlib")
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    panels = {"h2o": ((0.0, 1.0), (0.5, 0.25))}
    heat = HeatMap(name="eviction-kept", title="Kept", x_label="x", y_label="y", panels=panels)
    runs = (
        run_object("batch-max", quality=part("bm_quality_over_fkv", 0.5)),
        run_object(
            "eviction",
            quality=part("full_quality", 0.9),
            kept=part("kept_h2o_old_half", 0.1, maps=(heat,)),
        ),
    )
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["eviction", str(tmp_path / "a"), str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "eviction-measured.md").read_text()
    assert "| `bm_quality_over_fkv` | 0.5 | at least 0.975 |" in text
    assert text.index("## Batch-Max: quality over full KV") < text.index("## Rules, budgets, tasks")
    assert "| r | 0.9 |" in text
    assert "![Kept](images/measured-eviction-kept.svg)" in text
    assert "<svg" in (tmp_path / "images" / "measured-eviction-kept.svg").read_text()
    stored = json.loads((tmp_path / "results" / "eviction.json").read_text())
    assert set(stored["arms"]) == {"batch-max-quality", "rules-quality", "rules-kept"}
    assert "raw" not in stored["arms"]["rules-kept"]

    maker.main(["eviction"], tmp_path)
    assert (tmp_path / "eviction-measured.md").read_text() == text

    later = run_object("eviction", quality=part("full_quality", 0.8)) | {"commit": "def"}
    (tmp_path / "c").write_text(json.dumps(later))
    maker.main(["eviction", str(tmp_path / "c")], tmp_path)
    text = (tmp_path / "eviction-measured.md").read_text()
    assert "## Rules, budgets, tasks\n\nCommit def, 2 threads." in text
    assert text.count("Commit abc, 2 threads.") == 2
