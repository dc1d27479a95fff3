"""docs/make_page.py offload: a page from separate runs of the benchmark."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.offload.parts import PARTS
from support.measured_pages import load_maker, run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_separately_run_parts_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = (
        run_object("offload", "engine_gain", {"engine_gain_lB_over_prefetch": 1.7}),
        run_object("offload", "restore", {"restore_gain_vs_load": 2.5}),
    )
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["offload", str(tmp_path / "a")], tmp_path)
    maker.main(["offload", str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "offload-measured.md").read_text()
    assert "| `engine_gain_lB_over_prefetch` | 1.7 | at least 1.3 |" in text
    assert text.index("## Prefix loads") < text.index("## In the engine, on a slowed link")


def test_every_part_has_a_title(maker: ModuleType):
    assert list(maker.PAGES["offload"].parts) == list(PARTS)
