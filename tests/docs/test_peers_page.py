"""docs/make_page.py peers: the page of a run, and a heading for every part."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers.command import SHAPES
from support.measured_pages import load_maker, run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_page_shows_claims_with_targets_and_the_instruction_sets(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    run = run_object("peers", "125m 8x128+64", {"eight_users_vs_best_peer": 1.25})
    run["config"] |= {"instructions": ["avx2"], "eviction": {"most": 192}, "files": "/of/one/run"}
    (tmp_path / "run").write_text(json.dumps(run))

    maker.main(["peers", str(tmp_path / "run")], tmp_path)

    text = (tmp_path / "peers-measured.md").read_text()
    label = maker.PAGES["peers"].labels["eight_users_vs_best_peer"]
    assert f"| {label} | 1.25 | at least 1.0 |" in text
    assert "## 125M parameters: 8 users" in text
    assert "a processor (avx2)" in text
    assert "retains 192 tokens" in text
    stored = json.loads((tmp_path / "results" / "peers.json").read_text())
    assert stored["config"]["files"] == "run"  # not the folder of one machine


def test_every_listed_claim_has_a_label(maker: ModuleType):
    assert maker.PAGES["peers"].labels.keys() == maker.PAGES["peers"].targets.keys()


def test_every_part_has_a_heading(maker: ModuleType):
    models = ("125m", "15m", "1100m")

    assert list(maker.PAGES["peers"].parts) == [
        f"{model} {shape}" for model in models for shape in SHAPES.split(",")
    ]
