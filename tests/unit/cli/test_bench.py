"""`quire bench`: throughput and latency of a model."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.main import app

SMALL = ("--kv-memory", "4MiB", "--no-verify", "--threads", "1", "--dtype", "float32")
SHAPE = ("--input-len", "24", "--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1")


def bench(*arguments: str) -> dict[str, Any]:
    line = ["bench", *arguments, *SMALL, *SHAPE, "--json"]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_throughput_counts_requests_and_tokens_per_second():
    run = bench("throughput", "quire-tiny", "--num-prompts", "3")

    claims = run["claims"]
    assert len(run["arms"]["rounds"]) == 2
    assert claims["requests_per_s"] == pytest.approx(3 / claims["total_s"])
    assert claims["output_tokens_per_s"] == pytest.approx(12 / claims["total_s"])
    assert claims["total_tokens_per_s"] == pytest.approx((72 + 12) / claims["total_s"])
    assert 0 < claims["kv_peak_bytes"] <= claims["kv_total_bytes"] <= 4 << 20


def test_latency_reports_percentiles_of_batches():
    run = bench("latency", "quire-tiny", "--batch-size", "2")

    claims, totals = run["claims"], [found["total_s"] for found in run["arms"]["rounds"]]
    assert min(totals) <= claims["latency_p50_s"] <= claims["latency_p99_s"] <= max(totals)
    assert 0 < claims["first_token_p50_s"] < claims["latency_mean_s"]
    assert run["config"]["shape"]["requests"] == 2


def test_length_beyond_the_context_is_refused():
    arguments = ["bench", "throughput", *SMALL, "--input-len", "99999"]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert "--input-len + --output-len" in result.stderr
