"""`python -m benchmarks kvcrush` as a command, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush import config as kvcrush_config
from benchmarks.kvcrush.config import (
    SWEEPS,
    FidelityConfig,
    KVCrushBenchConfig,
    OverheadConfig,
    PaperConfig,
    PromptsConfig,
    QualityConfig,
    heads_of,
)

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
        swept=BASE,
        tasks=("lines",),
        tokens=128,
        prompts=1,
        budget=0.5,
        other_budgets=(),
        shares=(0.0, 0.25),
        anchors=("mean",),
        several=(),
        chunk_tokens=4,
        paper=PaperConfig(divisor=8),
        every=4,
    )
    fidelity = FidelityConfig(
        bases=BASE, tokens=96, texts=1, new_tokens=4, cap=24, every=4, page_tokens=2
    )
    small = KVCrushBenchConfig(
        quality=quality,
        heads=replace(heads_of(quality), tasks=quality.tasks),
        sweeps=replace(quality, tables=SWEEPS),
        fidelity=fidelity,
        long=replace(fidelity, name="long", blocks=0, pyramid=BASE[0], cap=40),
        prompts=PromptsConfig(
            tokens=128,
            prompts=1,
            new_tokens=4,
            paper=PaperConfig(divisor=8),
            shares=(0.25,),
            anchors=("mean",),
        ),
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
    continued = last_object(benchmark("--parts", "quality,sweeps", "--out", str(out)))

    assert run["name"] == "bench kvcrush"
    assert list(run["arms"]) == [
        *("quality", "heads", "sweeps", "fidelity", "long", "overhead", "bytes"),
    ]
    assert {
        *("quality_gain_mean", "quality_gain_low", "quality_gain_high", "openvino_gain_mean"),
        *("quality_over_full_best", "overhead_fraction", "kmeans_overhead_fraction"),
        *("fidelity_kl_gain_mean", "key_bits_over_signature_bits"),
    } <= set(run["quick_figures"])
    assert {"kvcrush.json", "kvcrush-long.csv", "kvcrush-bases.csv", "kvcrush-shares.svg"} <= {
        path.name for path in out.iterdir()
    }
    assert (out / "cells.jsonl").read_text() == cells
    assert (
        continued["quick_figures"]["quality_gain_mean"] == run["quick_figures"]["quality_gain_mean"]
    )


@pytest.mark.slow
def test_recorded_examples_and_lengths_are_selected(tmp_path: Path):
    examples = [{"question": f"What is {i} and 1?", "answer": f"#### {i + 1}"} for i in range(40)]
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(examples))

    run = last_object(
        benchmark(
            "--parts", "prompts", "--data", f"gsm8k={path}", "--tokens", "1024", "--budget", "12"
        )
    )

    assert {"gsm8k_kl_gain_mean", "gsm8k_kl_gain_one_set_low", "gsm8k_full_score"} <= set(
        run["quick_figures"]
    )
    for part in ("quality", "sweeps"):
        config = run["config"][part]
        assert (config["tokens"], config["budget"], config["paper"]["divisor"]) == (1024, 0.12, 2)


def test_bases_and_dtypes_are_selected():
    run = last_object(
        benchmark(
            *("--parts", "overhead,bytes", "--bases", "average; h2o", "--dtype", "float32"),
            *("--prompts", "3"),
        )
    )

    assert run["config"]["overhead"]["base"] == {"text": "average"}
    assert run["config"]["overhead"]["dtype"] == "float32"
    assert run["config"]["quality"]["prompts"] == run["config"]["sweeps"]["prompts"] == 3
    assert run["config"]["quality"]["bases"] == [{"text": "average"}, {"text": "h2o"}]
    assert "base=(average)" in run["arms"]["overhead"]["raw"]["runs"]["kvcrush"]["evict"]
    assert run["quick_figures"]["key_bits_over_signature_bits"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bases", "h2p"), "h2o"),
        (("--bases", "recent", "--parts", "quality"), "whose scores differ between query heads"),
        (("--tasks", "lined"), "lines"),
        (("--budget", "50,25"), "one budget"),
        (("--budget", "150"), "up to 100"),
        (("--tokens", "8"), "64"),
        (("--data", "gsm9k=x.json"), "gsm8k"),
        (("--data", "gsm8k"), "gsm8k=FILE"),
        (("--data", "gsm8k=a", "--data", "gsm8k=b"), "each task once"),
        (("--data", "gsm8k=no.json", "--parts", "prompts"), "no.json"),
        (("--parts", "prompts"), "--data gsm8k="),
        (("--parts", "quantity"), "quality"),
        (("--parts", "fidelity", "--text", "no.txt"), "no.txt"),
    ],
)
def test_invalid_values_raise(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["kvcrush", "--quick", *arguments])

    assert result.exit_code != 0, result.output
    assert message in " ".join(f"{result.exception} {result.output}".split())
