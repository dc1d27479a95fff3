"""docs/make_page.py: committed pages equal those of the stored results, and pages of runs."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.batch_max.command import PARTS as BATCH_MAX
from benchmarks.cluster.parts import PARTS as CLUSTER
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.eviction import PARTS as EVICTION
from benchmarks.kvcrush import PARTS as KVCRUSH
from benchmarks.memory.command import PARTS as MEMORY
from benchmarks.offload.command import PARTS as OFFLOAD
from benchmarks.peers.command import SHAPES
from benchmarks.quant.command import PARTS as QUANT
from benchmarks.rebatch.parts import PARTS as REBATCH
from benchmarks.roofline.measured import ENGINE, PARTS, SAMPLING
from benchmarks.weights import PARTS as WEIGHTS
from docs import papers_page
from quire.errors import ConfigError
from quire.evals.suite.perplexity import NLL
from quire.scale.routing.policies import ROUTERS
from quire.scheduler.batchers import DENSE_BATCHERS
from support.roofline_cells import run_object
from support.snippets import ROOT

DOCS = ROOT / "docs"
_SPEC = importlib.util.spec_from_file_location("make_page", DOCS / "make_page.py")
MAKER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(MAKER)
# a page without stored results has not been written yet
STORED = [name for name in MAKER.PAGES if (DOCS / "results" / f"{name}.json").exists()]


@pytest.mark.parametrize("name", [*STORED, "roofline", "demo"])
def test_page_generated_from_stored_results_equals_the_committed_page(name: str, tmp_path: Path):
    """Images are compared by name: their bytes depend on the version of matplotlib."""
    pytest.importorskip("matplotlib")
    (tmp_path / "images").mkdir()
    shutil.copytree(DOCS / "results", tmp_path / "results")

    MAKER.main([name], tmp_path)

    for generated in tmp_path.glob("*.md"):
        committed = (DOCS / generated.name).read_text(encoding="utf-8")
        assert generated.read_text() == committed, generated.name
    images = {path.name for path in (tmp_path / "images").iterdir()}
    assert images <= {path.name for path in (DOCS / "images").iterdir()}
    for stored in (tmp_path / "results").iterdir():
        assert stored.read_bytes() == (DOCS / "results" / stored.name).read_bytes()


def test_every_part_and_name_has_a_row_and_unknown_pages_are_refused(capsys):
    pages = {"cluster": CLUSTER, "kvcrush": KVCRUSH, "memory": MEMORY, "offload": OFFLOAD}
    pages |= {"quant": QUANT, "rebatch": REBATCH, "weights": WEIGHTS}
    pages["eviction"] = [*(f"batch-max-{n}" for n in BATCH_MAX), *(f"rules-{n}" for n in EVICTION)]
    pages["peers"] = [f"{m} {s}" for m in ("125m", "15m", "1100m") for s in SHAPES.split(",")]
    for page, parts in pages.items():
        assert list(MAKER.PAGES[page].parts) == list(parts)
    assert MAKER.PAGES["peers"].labels.keys() == MAKER.PAGES["peers"].targets.keys()
    for page, names in {"batchers": (*DENSE_BATCHERS, "continuous"), "scale": ROUTERS}.items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert all(f"\n| `{name}` |" in text for name in names)

    with pytest.raises(SystemExit):
        MAKER.main(["stack"])
    assert "choose from eviction, kvcrush, memory" in capsys.readouterr().err.replace("'", "")


# ---- pages of runs -------------------------------------------------------------------------------


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    return tmp_path


def run_of(bench: str, part: str, claims: dict[str, float]) -> dict[str, Any]:
    table = Table(name="t", caption="Of it.", columns=("a", "b"), rows=(("r", 1.5),))
    lines = {"one": ((1, 2.0), (2, 3.0)), "other": ((1, 4.0), (2, 5.0))}
    chart = Chart(name="beam", title="Peaks", x_label="x", y_label="y", lines=lines, log_x=True)
    charts = (chart,) if bench == "memory" else ()
    made = PartResult(claims=claims, tables=(table,), charts=charts, raw={"a": [1]})
    machine = {
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "quire": "0.1.0"},
    }
    run = {"name": f"bench {bench}", "claims": claims, "arms": {part: made.to_json()}}
    return run | machine | {"config": {"threads": 1}, "commit": "abc"}


def stored_in(docs: Path, name: str) -> dict[str, Any]:
    return json.loads((docs / "results" / f"{name}.json").read_text())


def total_run() -> dict[str, Any]:
    quire = {"total_s": 2.5, "prefill_s": 1.25, "decode_step_s": 0.02, "tokens_per_s": 819.2}
    quire |= {"kv_bytes": 4_000_000, "mean_regret": 0.5}
    claims = {f"quire_{name}": value for name, value in quire.items()}
    work = {"model": "125m", "prompts": 32, "prompt_tokens": 512, "new_tokens": 64}
    config = {"workload": work, "threads": 2, "repeats": 5}
    claims |= {"statistics_overhead": 0.125}
    run = {"name": "bench throughput", "claims": claims, "arms": {"rounds": [1, 2, 3]}}
    return run | {"config": config, "commit": "abc"}


def put(path: Path, run: dict[str, Any]) -> str:
    path.write_text("read 1 GB/s\n" + json.dumps(run) + "\n")
    return str(path)


def test_roofline_runs_are_written_as_page_images_and_stored_results(docs: Path):
    runs = (put(docs / "a.out", run_object()), put(docs / "b.out", total_run()))

    MAKER.main(["roofline", *runs], docs)

    text = (docs / "roofline.md").read_text()
    assert "| Quire | 2.50 | 1.25 | 20.0 | 819 | 4.0 | 0.5000 |" in text
    assert "| `statistics_overhead` | 0.125 | at most 0.15 |" in text
    for name in (*PARTS, SAMPLING, ENGINE, "total"):
        assert f"\n| {name} | " in text
    assert text.index("## avx512_bf16") < text.index("## avx2")
    assert (docs / "images/roofline.svg").read_text().startswith("<svg")
    stored = stored_in(docs, "throughput")
    assert stored["claims"] == total_run()["claims"]
    assert stored["arms"] == {}


def test_cells_of_several_runs_are_merged(docs: Path, monkeypatch: pytest.MonkeyPatch):
    """The highest instruction set comes first, and its claims have plain names."""
    monkeypatch.setattr(MAKER, "shares_svg", lambda cells: "<svg/>")
    both = run_object()
    for i in (1, 0):
        run = both | {"arms": {"cells": [both["arms"]["cells"][i]], "refused": []}}
        MAKER.main(["roofline", put(docs / f"{i}.out", run)], docs)

    stored = stored_in(docs, "roofline")
    assert stored["arms"]["cells"] == json.loads(json.dumps(both["arms"]["cells"]))
    assert {"decode_step_over_floor_avx2_int8", "small_batch_step_over_floor"} <= set(
        stored["claims"]
    )


def test_memory_runs_are_written_as_page_images_and_stored_results(docs: Path):
    """The second run replaces its part; the other part of the first run is retained."""
    first = run_of("memory", "beam", {"beam4_memory_ratio": 1.5})
    first["arms"]["waste"] = PartResult(claims={"waste": 1}, tables=()).to_json()
    second = run_of("memory", "beam", {"beam4_memory_ratio": 1.25})

    MAKER.main(["memory", put(docs / "a", first), put(docs / "b", second)], docs)

    text = (docs / "memory-measured.md").read_text()
    assert "| `beam4_memory_ratio` | 1.25 | at most 1.10 |" in text
    assert "![Peaks](images/measured-beam.svg)" in text
    assert "<svg" in (docs / "images" / "measured-beam.svg").read_text()
    stored = stored_in(docs, "memory")
    assert stored["claims"] == {"beam4_memory_ratio": 1.25, "waste": 1}
    assert "raw" not in stored["arms"]["beam"]
    (docs / "memory-measured.md").unlink()
    MAKER.main(["memory"], docs)
    assert (docs / "memory-measured.md").read_text() == text


def test_runs_of_two_benchmarks_share_a_page(docs: Path):
    def page_of(*runs: dict[str, Any]) -> str:
        MAKER.main(["eviction", *(put(docs / "run", run) for run in runs)], docs)
        return (docs / "eviction-measured.md").read_text()

    text = ""
    for bench, part, claim, value in (
        ("batch-max", "speed", "bm_over_ed_throughput", 1.75),
        ("eviction", "cost", "eviction_cost_share", 0.5),
        ("eviction", "ready", "ready_layer_us", 8),
    ):
        text = page_of(run_of(bench, part, {claim: value}))
        assert f"| `{claim}` | {value} |" in text

    assert "| `bm_over_ed_throughput` | 1.75 | at least 1.5 |" in text
    assert text.index("## Batch-Max: throughput") < text.index("## Cost of eviction")
    stored = stored_in(docs, "eviction")
    assert set(stored["arms"]) == {"batch-max-speed", "rules-cost", "rules-ready"}
    assert "raw" not in stored["arms"]["rules-cost"]
    assert page_of() == text
    later = run_of("eviction", "cost", {"eviction_cost_share": 0.25}) | {"commit": "def"}
    text = page_of(later)
    assert "## Cost of eviction\n\nCommit def, 1 thread." in text
    assert text.count("Commit abc, 1 thread.") == 2


@pytest.mark.parametrize(
    ("loss", "verdict"), [(0.0, "holds"), (0.3, "does not hold"), (0.02, "not decided")]
)
def test_verdict_on_a_claim_compares_the_interval_of_the_paired_difference(loss, verdict):
    """Every second prompt loses twice the mean loss."""
    full = np.full(200, 0.9)
    less = full * (1 - loss - loss * (-1.0) ** np.arange(200))
    one, whole = ({"niah": values, NLL: -np.log(values)} for values in (less, full))
    scores = {"one": one, papers_page.FULL: whole}
    claim = papers_page.Claim("kvcrush", "no loss", "one", at_least=0.98)

    found = papers_page.measured(claim, scores, ["niah", NLL])

    assert found.mean == pytest.approx(1 - loss)
    assert papers_page.Judged(claim, found).verdict == verdict
    one_prompt_gains = replace(found, mean=0.01, low=0.0, high=0.02)
    judged = papers_page.Judged(replace(claim, at_least=0.0), one_prompt_gains)
    assert judged.verdict == "not decided"


def test_page_of_claims_is_of_the_prompts_of_all_seeds_of_one_run(docs: Path, tmp_path: Path):
    """All entries have the same scores: no claim of a gain holds, however many prompts agree."""
    cells = tmp_path / "cells"
    cells.mkdir()

    def write(name: str, arm: str, task: str, metric: str) -> None:
        prompts = [{"scores": {metric: 0.5}}, {"scores": {}}, *[{"scores": {metric: 1.0}}] * 248]
        values = {"arm": arm, "task": task, "tokens": 64, "prompts": prompts}
        (cells / f"{name}.json").write_text(json.dumps({"values": values}))

    arms = sorted({name for claim in papers_page.CLAIMS for name in (claim.entry, claim.other)})
    for number, arm in enumerate(arms):
        write(f"niah-{number}", arm, "niah", "accuracy")
        write(f"perplexity-{number}", arm, "perplexity", NLL)
    config = {"model": "smollm2", "tokens": 64, "num_prompts": 125, "seeds": [1, 2]}
    run = {"config": config, "arms": {"judged_tasks": ["niah"]}, "commit": "abcdefgh"}
    (tmp_path / "board.json").write_text(json.dumps(run))

    papers_page.main(tmp_path, docs)

    stored = (docs / "results" / "papers.json").read_text()
    found = json.loads(stored, parse_constant=pytest.fail)  # no Infinity
    verdicts = {(one["measure"], one["at_least"]): one["verdict"] for one in found}
    assert verdicts["gain", 0.0] == "not decided"
    assert verdicts["gain", -0.025] == verdicts["quality", 0.975] == "holds"
    assert verdicts["quality", 0.99] == "not decided"
    assert {one["count"] for one in found} == {249}
    assert "250 prompts of 64 tokens of each task" in (docs / "papers.md").read_text()
    (tmp_path / "board.json").write_text(json.dumps(run | {"arms": {"judged_tasks": []}}))
    with pytest.raises(ConfigError, match="no task of the leaderboard counts"):
        papers_page.main(tmp_path, docs)
    (tmp_path / "board.json").write_text(json.dumps(run))
    write("niah-again", papers_page.FULL, "niah", "accuracy")
    with pytest.raises(ConfigError, match=r"two results of .* on niah"):
        papers_page.main(tmp_path, docs)
