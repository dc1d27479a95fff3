"""docs/make_page.py roofline: a page from runs, and again from the stored results."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.roofline.measured import ENGINE, PARTS, SAMPLING
from support.measured_pages import load_maker
from support.roofline_cells import run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


@pytest.fixture
def undrawn(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script without matplotlib, for tests of the stored results."""
    monkeypatch.setattr(maker, "shares_svg", lambda cells: "<svg/>")
    return maker


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    return tmp_path


def total_run() -> dict[str, Any]:
    quire = {"total_s": 2.5, "prefill_s": 1.25, "decode_step_s": 0.02, "tokens_per_s": 819.2}
    quire |= {"kv_bytes": 4_000_000, "mean_regret": 0.5}
    claims = {f"quire_{name}": value for name, value in quire.items()}
    work = {"model": "125m", "prompts": 32, "prompt_tokens": 512, "new_tokens": 64}
    return {
        "name": "bench throughput",
        "claims": claims | {"statistics_overhead": 0.125},
        "arms": {"rounds": [1, 2, 3]},
        "config": {"workload": work, "threads": 2, "repeats": 5},
        "commit": "abc",
    }


def put(path: Path, run: dict[str, Any]) -> str:
    path.write_text("read 1 GB/s\n" + json.dumps(run) + "\n")
    return str(path)


def test_runs_are_written_as_page_images_and_stored_results(maker: ModuleType, docs: Path):
    runs = (put(docs / "a.out", run_object()), put(docs / "b.out", total_run()))

    maker.main(["roofline", *runs], docs)

    text = (docs / "roofline.md").read_text()
    assert "| Quire | 2.50 | 1.25 | 20.0 | 819 | 4.0 | 0.5000 |" in text
    assert "| `statistics_overhead` | 0.125 | at most 0.15 |" in text
    for name in (*PARTS, SAMPLING, ENGINE, "total"):
        assert f"\n| {name} | " in text
    assert text.index("## avx512_bf16") < text.index("## avx2")
    assert (docs / "images/roofline.svg").read_text().startswith("<svg")
    stored = json.loads((docs / "results/throughput.json").read_text())
    assert stored["claims"] == total_run()["claims"]
    assert stored["arms"] == {}


def test_cells_of_several_runs_are_merged(undrawn: ModuleType, docs: Path):
    """The highest instruction set comes first, and its claims have plain names."""
    both = run_object()
    for i in (1, 0):
        run = both | {"arms": {"cells": [both["arms"]["cells"][i]], "refused": []}}
        undrawn.main(["roofline", put(docs / f"{i}.out", run)], docs)

    stored = json.loads((docs / "results/roofline.json").read_text())
    assert stored["arms"]["cells"] == json.loads(json.dumps(both["arms"]["cells"]))
    assert "decode_step_over_floor_avx2_int8" in stored["claims"]
    assert "small_batch_step_over_floor" in stored["claims"]


def test_weights_as_stored_come_first(undrawn: ModuleType, docs: Path):
    run = run_object()
    first = run["arms"]["cells"][0]
    cells = [first | {"weight_codec": codec} for codec in ("int4", "auto", "int8")]
    cells.append(first | {"implementation": "transformers"})
    run["arms"]["cells"] = cells

    undrawn.main(["roofline", put(docs / "run.out", run)], docs)

    stored = json.loads((docs / "results/roofline.json").read_text())
    found = [(cell["implementation"], cell["weight_codec"]) for cell in stored["arms"]["cells"]]
    native = [("native", codec) for codec in ("auto", "int8", "int4")]
    assert found == [*native, ("transformers", "auto")]
    assert "small_batch_step_over_floor_int4" in stored["claims"]
