"""docs/make_page.py rebatch and docs/batchers.md."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.rebatch.parts import PARTS
from quire.scheduler.batchers.registry import DENSE_BATCHERS
from support.measured_pages import load_maker, run_object
from support.snippets import ROOT

PAGE = ROOT / "docs" / "batchers.md"


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_separately_run_parts_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = (
        run_object("rebatch", "w2", {"w2_batonpd_over_bound_b4": 0.97}),
        run_object("rebatch", "w1", {"w1_batonpd_over_bound_b8": 0.95}),
    )
    for run in runs:
        run["config"]["model"] = "wide"
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["rebatch", str(tmp_path / "a")], tmp_path)
    maker.main(["rebatch", str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "rebatch-measured.md").read_text()
    assert "| `w1_batonpd_over_bound_b8` | 0.95 | at least 0.9 |" in text
    assert text.index("## Long and short") < text.index("## Short queries")


def test_every_part_has_a_title(maker: ModuleType):
    assert list(maker.PAGES["rebatch"].parts) == list(PARTS)


def test_every_batcher_has_a_row():
    table = PAGE.read_text(encoding="utf-8")

    for name in (*DENSE_BATCHERS, "continuous"):
        assert f"\n| `{name}` |" in table
