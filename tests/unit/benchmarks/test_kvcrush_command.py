"""`python -m benchmarks kvcrush` as a command, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.kvcrush import config as kvcrush_config
from benchmarks.kvcrush.config import (
    FidelityConfig,
    KVCrushBenchConfig,
    OverheadConfig,
    QualityConfig,
)
from benchmarks.quality.rules import Rule

BASE = (Rule("h2o"),)


def benchmark(*arguments: str) -> Result:
    arguments = ("kvcrush", "--quick", "--json", "--no-verify", *arguments)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def last_object(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quality = QualityConfig(
        bases=BASE,
        pyramid=BASE[0],
        tasks=("lines",),
        tokens=128,
        prompts=1,
        budget=0.5,
        heads_budgets=(0.5,),
        page_tokens=4,
        every=4,
    )
    fidelity = FidelityConfig(
        bases=BASE, tokens=96, texts=1, new_tokens=4, first=24, every=4, page_tokens=2
    )
    small = KVCrushBenchConfig(
        quality=quality,
        heads=quality,
        fidelity=fidelity,
        long=replace(fidelity, name="long", blocks=0, pyramid=BASE[0], first=40),
        overhead=OverheadConfig(
            model="tiny", rows=1, prompt_tokens=48, new_tokens=4, cap=32, every=4
        ),
    )
    monkeypatch.setattr(kvcrush_config, "QUICK_KVCRUSH", small)


@pytest.mark.slow
def test_all_parts_print_claims_and_an_interrupted_run_continues(tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"

    run = last_object(benchmark("--out", str(out)))
    cells = (out / "cells.jsonl").read_text()
    continued = last_object(benchmark("--parts", "quality,heads", "--out", str(out)))

    assert run["name"] == "bench kvcrush"
    assert list(run["arms"]) == [
        *("quality", "heads", "fidelity", "long", "overhead"),
    ]
    assert {
        *("quality_gain_mean", "quality_gain_low", "quality_gain_high", "openvino_gain_mean"),
        *("quality_over_full_best", "overhead_fraction", "kmeans_overhead_fraction"),
        *("fidelity_kl_gain_mean", "heads_quality_gain_50_mean"),
    } <= set(run["quick_figures"])
    assert {"kvcrush.json", "kvcrush-long.csv", "kvcrush-bases.csv"} <= {
        path.name for path in out.iterdir()
    }
    assert (out / "cells.jsonl").read_text() == cells
    assert (
        continued["quick_figures"]["quality_gain_mean"] == run["quick_figures"]["quality_gain_mean"]
    )


def test_bases_and_dtypes_are_selected():
    run = last_object(
        benchmark(
            *("--parts", "overhead", "--bases", "average; h2o", "--dtype", "float32"),
            *("--prompts", "3"),
        )
    )

    assert run["config"]["overhead"]["base"] == {"text": "average"}
    assert run["config"]["overhead"]["dtype"] == "float32"
    assert run["config"]["quality"]["prompts"] == run["config"]["heads"]["prompts"] == 3
    assert run["config"]["quality"]["bases"] == [{"text": "average"}, {"text": "h2o"}]
    assert "base=(average)" in run["arms"]["overhead"]["raw"]["runs"]["kvcrush"]["evict"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bases", "h2p"), "h2o"),
        (("--bases", "recent", "--parts", "quality"), "whose scores differ between query heads"),
        (("--tasks", "lined"), "lines"),
        (("--budget", "50,25"), "one budget"),
        (("--budget", "150"), "up to 100"),
        (("--parts", "quantity"), "quality"),
        (("--parts", "fidelity", "--text", "no.txt"), "no.txt"),
    ],
)
def test_invalid_values_raise(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["kvcrush", "--quick", *arguments])

    assert result.exit_code != 0, result.output
    assert message in " ".join(f"{result.exception} {result.output}".split())
