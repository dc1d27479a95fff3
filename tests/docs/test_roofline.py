"""docs/make_page.py roofline: a page from a run, and again from the stored results."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.throughput.measured import ENGINE, PARTS
from support.measured_pages import load_maker
from support.snippets import ROOT


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def run_object() -> dict[str, Any]:
    costs = [{"name": name, "weight_bytes": 10**6, "kv_bytes": 0, "flops": 10**9} for name in PARTS]
    measure = {
        "kind": "decode",
        "tokens": 32.0,
        "steps": 5,
        "costs": costs,
        "seconds": dict.fromkeys((*PARTS, ENGINE), 0.01),
    }
    quire = {"total_s": 2.5, "prefill_s": 1.25, "decode_step_s": 0.02, "tokens_per_s": 819.2}
    quire |= {"kv_bytes": 4_000_000, "mean_regret": 0.5}
    claims = {f"quire_{name}": value for name, value in quire.items()}
    claims |= {"read_bytes_per_s": 1e9, "product_flops_per_s": 1e12, "statistics_overhead": 0.125}
    work = {"model": "125m", "prompts": 32, "prompt_tokens": 512, "new_tokens": 64}
    return {
        "claims": claims,
        "arms": {"parts": [measure], "rounds": [1, 2, 3]},
        "config": {"workload": work, "threads": 2, "repeats": 5},
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0", "quire": "0.1.0"},
        "commit": "abc",
    }


def test_run_is_written_as_page_image_and_stored_results(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run.out").write_text("read 1 GB/s\n" + json.dumps(run_object()) + "\n")

    maker.main(["roofline", str(tmp_path / "run.out")], tmp_path)

    text = (tmp_path / "roofline.md").read_text()
    assert "| Quire | 2.50 | 1.25 | 20.0 | 819 | 4.0 | 0.5000 |" in text
    assert "| `statistics_overhead` | 0.125 | at most 0.15 |" in text
    for name in (*PARTS, ENGINE, "total"):
        assert f"\n| {name} | " in text
    assert (tmp_path / "images/roofline.svg").read_text().startswith("<svg")
    stored = json.loads((tmp_path / "results/throughput.json").read_text())
    assert stored["claims"] == run_object()["claims"]
    assert list(stored["arms"]) == ["parts"]


def test_page_is_regenerated_from_stored_results(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run.out").write_text(json.dumps(run_object()))
    maker.main(["roofline", str(tmp_path / "run.out")], tmp_path)
    first = (tmp_path / "roofline.md").read_text()
    (tmp_path / "roofline.md").unlink()

    maker.main(["roofline"], tmp_path)

    assert (tmp_path / "roofline.md").read_text() == first


def test_committed_page_equals_the_page_of_the_committed_run(maker: ModuleType):
    stored = ROOT / "docs/results/throughput.json"
    if not stored.is_file():
        pytest.skip("no run of the throughput benchmark is stored")
    run = json.loads(stored.read_text(encoding="utf-8"))

    generated = maker.roofline_page(run)

    assert (ROOT / "docs/roofline.md").read_text(encoding="utf-8") == generated
