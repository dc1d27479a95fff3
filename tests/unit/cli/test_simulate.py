import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import quire.cli.main as cli
from quire.sim.machine import MachineConfig
from support.command_line import last_json

TRACE = "num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{50 + i % 9},{4 + i % 5}\n" for i in range(40)
)


def simulate(*arguments):
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_text_report_has_percentiles_memory_and_fairness_of_tenants(trace):
    shown = simulate("--trace", trace).stdout

    for text in ("40 requests", "time to first token", "p99", "KV memory", "preemptions"):
        assert text in shown
    assert "MiB, which holds all requests at once: mean usage" in shown
    small = simulate("--trace", trace, "--kv-memory", "64MiB").stdout
    assert "\nKV memory 64.00 MiB: mean usage" in small
    options = ("--max-num-seqs", 2, "--trace-tenants", "round_robin:a,b")
    shown = simulate("quire-tiny", "--trace", trace, *options).stdout
    assert "Jain fairness index 1.0" in shown or "Jain fairness index 0.9" in shown


@pytest.mark.parametrize(
    ("given", "profiled", "named"),
    [
        ((), False, "a100 (60% of peaks of a data sheet)"),
        ((), True, "profile (100% of this machine as measured)"),
        (("--machine", "h100"), True, "h100 (60% of peaks of a data sheet)"),
        (
            ("--machine", "a100", "--efficiency", "0.5"),
            False,
            "a100 (50% of peaks of a data sheet)",
        ),
    ],
)
def test_report_names_the_simulated_machine(trace, tmp_path, monkeypatch, given, profiled, named):
    if profiled:
        rates = MachineConfig(name="h200").rates()
        found = SimpleNamespace(products=[SimpleNamespace(dtype="bfloat16")])
        monkeypatch.setattr("quire.cli.simulate.read_ceilings", lambda *_: found)
        monkeypatch.setattr("quire.cli.simulate.measured_rates", lambda *_: rates)
        (tmp_path / "quire").mkdir()
        (tmp_path / "quire" / "ceilings.json").touch()

    [line] = [x for x in simulate("--trace", trace, *given).stdout.splitlines() if "machine:" in x]

    assert line.startswith(f"machine: {named}: reads ")
    assert ("quire profile" in line) is (not given and not profiled)


def test_options_apply_to_the_run_and_results_are_written(trace, tmp_path):
    result = simulate(
        *("quire-tiny", "--trace", trace, "--kv-memory", "1MiB", "--max-num-seqs", 3),
        *("--requests", 20, "--max-length", 60, "--length-scale", 0.5, "--json"),
        *("--trace-tenants", "round_robin:a,b", "--machine", "h100", "--request-rate", 100),
    )
    report = last_json(result)

    assert report["claims"]["requests"] + report["claims"]["left_out"] == 20
    assert report["claims"]["running_peak"] <= 3
    assert set(report["arms"]["tenants"]) == {"a", "b"}
    assert report["config"]["machine"]["name"] == "h100"

    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    out = tmp_path / "new" / "folder"

    report = last_json(simulate("--trace", trace, "--out", out, "--json"))

    assert sorted(path.name for path in out.iterdir()) == [
        *("queue.svg", "simulate.json", "ttft.svg", "use.svg")
    ]
    assert json.loads((out / "simulate.json").read_text()) == report
    assert (out / "use.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-9",), "unknown model shape"),
        (("--machine", "a10"), "to be one of auto, a100, h100, h200, profile, got 'a10'"),
        (("--machine", "profile"), "quire profile"),  # none is stored
        (("--kv-memory", "1kB"), "expected a KV memory"),
        (("--kv-memory", "7999999TiB"), "pages, expected at most 268,435,456"),
        (("--max-length", "1"), "(--max-length): raise it"),
        (("--requests", "0"), "requests of 1 or more"),
        (("--trace-format", "azur"), "did you mean azure"),
        (("--trace-tenants", "everyone"), "expected tenants as"),
        (("--trace-copies", "0"), "expected copies of 1 or more, got 0"),
        (("--replicas", "0"), "expected 1 to 4096 replicas, got 0"),
        (("--router", "least_loaded"), "--router has no effect with one replica: add --replicas 2"),
        (("--replicas", "2", "--router", "kvaware"), "did you mean kv_aware"),
        (("--efficiency", "2"), "efficiency"),
        (("--kv-codec", "int4+residual=64+promoted=8:int8"), "and eviction is off; use --evict"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_2(trace: Path, arguments, message):
    result = simulate("--trace", trace, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_output_that_cannot_be_written_is_refused_before_the_run(trace: Path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    inside = simulate("--trace", trace, "--out", trace / "inside")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    charts = simulate("--trace", trace, "--out", trace.parent / "charts")
    assert (inside.exit_code, charts.exit_code) == (2, 2)
    assert "cannot write" in inside.stderr
    assert "--out needs matplotlib (not installed): pip install" in charts.stderr


def test_skipped_truncated_and_too_long_requests_are_reported(tmp_path, trace):
    """quire-tiny has a context of 4,096: one prompt fills it, one output exceeds it."""
    path = tmp_path / "trace.csv"
    rows = ((4096, 1), (4000, 200), (50, 5), (9000, 1))
    lines = "\n".join(f"{prompt},{output}" for prompt, output in rows)
    path.write_text(f"num_prefill_tokens,num_decode_tokens\n{lines}\n")

    shown = simulate("quire-tiny", "--trace", path, "--max-length", 5000).stdout

    assert "refused requests: 1 longer than the context, 0 larger than the KV memory" in shown
    assert "skipped requests (too long): 1; outputs truncated at the context: 1" in shown

    # `auto` sizes the pool for requests that can run: lengths of 10^11 tokens are refused
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    result = simulate("--trace", trace, "--length-scale", "1e9")
    assert (result.exit_code, "longer than the context" in result.stdout) == (0, True)
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5000,1\n")
    result = simulate("quire-tiny", "--trace", path, "--out", tmp_path / "out", "--json")

    assert result.exit_code == 0, result.output
    assert last_json(result)["claims"]["refused_too_long"] == 1


# ---- clusters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["kv_aware", "least_loaded", "round_robin"])
def test_replicas_serve_a_trace_together(trace: Path, tmp_path: Path, router):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    result = simulate(
        *("quire-tiny", "--trace", trace, "--trace-copies", 3),
        *("--replicas", 4, "--router", router, "--out", tmp_path / "charts", "--json"),
    )
    report = last_json(result)

    assert {path.name for path in tmp_path.glob("charts/*")} == {"simulate.json", "ttft.svg"}
    assert f"4 replicas, router {router}" in result.stderr
    assert "busiest replica over the mean" in result.stderr
    assert report["claims"]["finished"] == 120
    assert sum(each["requests"] for each in report["arms"]["replicas"]) == 120
    assert report["config"]["router"]["name"] == router


@pytest.mark.parametrize("replicas", [1, 2])
def test_cost_of_tokens_is_reported(trace: Path, replicas):
    result = simulate(
        *("quire-tiny", "--trace", trace, "--replicas", replicas, "--price-per-hour", 2, "--json")
    )
    claims = last_json(result)["claims"]

    paid = 2 * replicas * claims["virtual_s"] / 3600
    tokens = claims["generated_tokens_per_s"] * claims["virtual_s"]
    assert claims["cost_per_million_output_tokens"] == pytest.approx(paid / tokens * 1e6)
    assert "at 2 per machine and hour" in result.stderr
