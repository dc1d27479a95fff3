"""`python -m benchmarks batch-max` and `eviction` as commands, at tiny sizes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.batch_max import config as batch_max_config
from benchmarks.batch_max import timed
from benchmarks.batch_max.batches import rows_that_fit
from benchmarks.batch_max.config import BatchMaxConfig, QualityConfig, SpeedConfig
from benchmarks.eviction import config as eviction_config
from benchmarks.eviction.config import (
    CellsConfig,
    CostConfig,
    EvictionBenchConfig,
    PerplexityConfig,
    RetainedConfig,
)
from benchmarks.eviction.rules import Rule

SUMS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(24)]
ONE_RULE = (Rule("recent"),)


def benchmark(*arguments: str) -> Result:
    arguments = (*arguments, "--no-verify")
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def refusal(*arguments: str) -> str:
    """Error output of a refused call, without line breaks."""
    result = CliRunner().invoke(app, [*arguments])

    assert result.exit_code != 0, result.output
    return " ".join(f"{result.exception} {result.output}".split())


def last_object(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert {"config", "commit", "versions", "hardware"} <= set(run)
    assert run["config"]["threads"] >= 1
    return run


@pytest.fixture
def small_batch_max(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration smaller than --quick."""
    small = BatchMaxConfig(
        speed=SpeedConfig(
            model="tiny",
            prompt_tokens=56,
            new_tokens=8,
            caps=(24,),
            every=8,
            pools=(2,),
            repeats=1,
            continuous_prompts=0,
            equal_prompts=2,
        ),
        quality=QualityConfig(
            tasks=("lines", "labels"), tokens=96, new_tokens=4, samples=2, pool=2, shares=(0.5,)
        ),
    )
    monkeypatch.setattr(batch_max_config, "QUICK_BATCH_MAX", small)
    monkeypatch.setattr(timed, "rows_that_fit", partial(rows_that_fit, most=16))  # 6 do


@pytest.fixture
def small_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    small = EvictionBenchConfig(
        quality=CellsConfig(rules=ONE_RULE, tasks=("lines",), tokens=128, prompts=2, every=4),
        perplexity=PerplexityConfig(rules=ONE_RULE, tokens=96, texts=1, every=4),
        kept=RetainedConfig(rules=ONE_RULE, tokens=96, texts=1, every=4, bins=4),
        cost=CostConfig(model="tiny", cap=32, every=4, rows=2, repeats=1),
    )
    monkeypatch.setattr(eviction_config, "QUICK_EVICTION", small)


@pytest.mark.usefixtures("small_batch_max")
def test_batch_max_prints_claims_and_repeats(tmp_path: Path):
    pytest.importorskip("matplotlib")

    run = last_object(benchmark("batch-max", "--quick", "--json", "--out", str(tmp_path / "out")))

    assert run["name"] == "bench batch-max"
    assert {"bm_over_ed_throughput", "bm_over_fkv_throughput", "bm_quality_over_fkv"} <= set(
        run["quick_figures"]
    )
    assert len(run["arms"]["speed"]["raw"]["rounds"]) == 1
    cells = run["arms"]["quality"]["raw"]["cells"]
    assert {cell["task"] for cell in cells} == {"lines", "labels"}
    assert run["config"]["speed"]["prompt_tokens"] == 56
    assert run["config"]["quality"]["model"] == "quire-tiny"
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"batch-max.json", "batch-max.md", "batch-max-static.csv", "batch-max.svg"} <= files


@pytest.mark.usefixtures("small_batch_max")
def test_batch_max_runs_requested_parts():
    requested = ("--parts", "speed", "--pools", "4,3", "--static-only", "--dtype", "float32")
    run = last_object(benchmark("batch-max", "--quick", "--json", *requested))

    assert list(run["arms"]) == ["speed"]
    assert run["config"]["speed"]["pools"] == [4, 3]
    assert run["config"]["speed"]["claimed_pool"] == 4
    times = run["arms"]["speed"]["raw"]["rounds"][0]
    # 2 layers x 2 heads x 16 numbers x K and V x 4 B = 512 B a token; rows of 56 + 8 tokens
    assert max(time["kv_bytes"] for time in times) == 4 * 64 * 512  # others: whole slabs
    assert not any(name.startswith("continuous") for name in run["quick_figures"])


def test_paper_protocol_runs_on_a_given_model_and_examples(tmp_path: Path):
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, SUMS)))

    result = benchmark(
        *("batch-max", "quire-tiny", "--protocol", "paper", "--task", "gsm8k"),
        *("--data", str(data), "--samples", "40", "--input-tokens", "384", "--new-tokens", "32"),
        *("--kv-memory", "1200KiB", "--quick", "--json"),
    )

    run = last_object(result)
    assert "rows do not fit" in result.output
    rows = run["arms"]["paper"]["raw"]["rows"]
    assert [row["arm"] for row in rows[:4]] == ["ed_2", "ed_2", "ed_17", "fkv"]
    assert rows[0]["batch"] == 4  # 96 tokens of 4 KiB, in whole slabs: 1,200 KiB hold three
    assert {row["judged"]["samples"] for row in rows[1:]} == {4}
    assert {row["judged"]["new_tokens"] for row in rows[1:]} == {4 * 8}
    assert any(row["arm"].startswith("bm_") for row in rows)
    assert run["quick_figures"]["ed_batch"] == 2
    assert run["config"]["input_tokens"] == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--protocol", "papers"), "paper"),
        (("--protocol", "paper", "--task", "gsm8"), "gsm8k"),
        (("--protocol", "paper", "--task", "gsm8k"), "--data"),
        (
            ("--protocol", "paper", "--task", "gsm8k", "--data", "nothing.json"),
            "nothing.json",
        ),
        (("--pools", "1,0"), "expected KV memories in rows of full KV such as 1,2,4"),
        (("--pools", "two"), "expected KV memories in rows of full KV such as 1,2,4"),
        (("--evict", "recent:cap=100"), "expected no --evict"),
        (("--parts", "sped"), "speed"),
    ],
)
def test_invalid_values_raise(arguments: tuple[str, ...], message: str):
    assert message in refusal("batch-max", *arguments)


def test_too_few_examples_raise(tmp_path: Path):
    data = tmp_path / "sums.json"
    data.write_text(json.dumps(SUMS))

    said = refusal("batch-max", "--protocol", "paper", "--task", "gsm8k", "--data", str(data))

    assert "960 samples and 16 shots" in said


@pytest.mark.slow
@pytest.mark.usefixtures("small_eviction")
def test_eviction_prints_claims_and_continues_an_interrupted_run(tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"

    first = benchmark("eviction", "--quick", "--json", "--budgets", "50", "--out", str(out))
    run = last_object(first)
    continued = benchmark(
        *("eviction", "--quick", "--json", "--parts", "quality", "--budgets", "50,25"),
        *("--out", str(out)),
    )

    assert list(run["arms"]) == ["quality", "perplexity", "kept", "cost", "ready"]
    assert {"perplexity_recent", "kept_recent_old_half", "eviction_cost_share"} <= set(
        run["quick_figures"]
    )
    assert len(run["arms"]["quality"]["raw"]["cells"]) == 3  # full, and a rule in two schedules
    assert (out / "eviction-kept.svg").read_text().count("<svg") == 1
    assert len((out / "cells.jsonl").read_text().splitlines()) == 5
    more = last_object(continued)["arms"]["quality"]["raw"]["cells"]
    assert more[:2] == run["arms"]["quality"]["raw"]["cells"][:2]
    assert len(more) == 5


@pytest.mark.usefixtures("small_eviction")
def test_rules_tasks_and_schedules_are_selected():
    result = benchmark(
        *("eviction", "--quick", "--json", "--parts", "quality", "--rules", "sinks:sinks=2"),
        *("--tasks", "kv", "--when", "decode", "--budgets", "40"),
    )

    run = last_object(result)
    assert run["config"]["quality"]["rules"] == [{"text": "sinks:sinks=2"}]
    keys = [cell["key"] for cell in run["arms"]["quality"]["raw"]["cells"]]
    assert [(key["task"], key["evict"]) for key in keys] == [
        ("kv", "full"),
        ("kv", "sinks:cap=51,every=4,when=decode,sinks=2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "h2p"), "h2o"),
        (("--tasks", "lined"), "lines"),
        (("--when", "decoding"), "decode"),
        (("--budgets", "half"), "such as 50,25"),
        (("--budgets", "150"), "up to 100"),
        (("--parts", "quantity"), "quality"),
        (("--quick", "--parts", "perplexity", "--text", "no.txt"), "no.txt"),
    ],
)
def test_eviction_invalid_options_raise(arguments: tuple[str, ...], message: str):
    assert message in refusal("eviction", *arguments)


def test_quick_run_is_smaller_in_every_part():
    quick, full = eviction_config.QUICK_EVICTION, EvictionBenchConfig()

    assert quick.quality.prompts < full.quality.prompts
    assert quick.perplexity.tokens * quick.perplexity.texts < full.perplexity.tokens
    assert replace(full, model="quire-tiny") == full


@pytest.mark.parametrize(("requested", "expected"), [((), 10), (("--prompts", "1"), 1)])
def test_prompts_option_applies_to_a_quick_run(requested, expected, monkeypatch):
    made = []

    def record(names, parts, config):
        made.append(config)
        return iter(())

    monkeypatch.setattr("benchmarks.common.command.run_named", record)
    result = CliRunner().invoke(app, ["eviction", "--quick", *requested])

    assert result.exit_code == 0, result.output
    assert made[0].quality.prompts == expected
