"""`python -m benchmarks eviction` as a command, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.eviction import config as eviction_config
from benchmarks.eviction.config import (
    CellsConfig,
    CostConfig,
    EvictionBenchConfig,
    PerplexityConfig,
    RetainedConfig,
)
from benchmarks.quality.rules import Rule

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
def small_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    small = EvictionBenchConfig(
        quality=CellsConfig(rules=ONE_RULE, tasks=("lines",), tokens=128, prompts=2, every=4),
        perplexity=PerplexityConfig(rules=ONE_RULE, tokens=96, texts=1, every=4),
        kept=RetainedConfig(rules=ONE_RULE, tokens=96, texts=1, every=4, bins=4),
        cost=CostConfig(model="tiny", cap=32, every=4, rows=2, repeats=1),
    )
    monkeypatch.setattr(eviction_config, "QUICK_EVICTION", small)


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
