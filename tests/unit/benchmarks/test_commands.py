import csv
import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import eviction, kvcrush
from benchmarks.__main__ import app
from benchmarks.batch_max import command as batch_max
from benchmarks.batch_max import speed
from benchmarks.batch_max.config import BatchMaxConfig
from benchmarks.cluster.parts import PARTS as CLUSTER_PARTS
from benchmarks.common.command import names_of, show_parts
from benchmarks.common.rendering import as_csv, report, svg
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.eviction import CostConfig, EvictionBenchConfig
from benchmarks.kvcrush import OverheadConfig
from benchmarks.memory import command as memory
from benchmarks.offload.config import QUICK_OFFLOAD
from benchmarks.offload.engine import run_engine, run_engine_gain
from benchmarks.offload.restore import run_restore
from benchmarks.roofline.command import sets_of
from quire.errors import ConfigError
from quire.kernels.native.library import NativeLibrary, load_library
from quire.models.native_linear import available_products
from support.redis_servers import requires_redis

needs_library = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)
needs_products = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)
slow = pytest.mark.slow
TINY_COST = CostConfig(model="tiny", others=(), cap=32, every=4, rows=2, repeats=1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cost = OverheadConfig(model="tiny", rows=2, prompt_tokens=48, new_tokens=8, cap=32, every=4)
    monkeypatch.setattr(kvcrush, "QUICK_KVCRUSH", cost)
    pair = EvictionBenchConfig(cost=TINY_COST, ready=TINY_COST)
    monkeypatch.setattr(eviction, "QUICK_EVICTION", pair)
    sizes = {"prompt_tokens": 56, "new_tokens": 8, "continuous_prompts": 2}
    batches = BatchMaxConfig(model="tiny", caps=(24,), every=8, repeats=1, **sizes)
    monkeypatch.setattr(batch_max, "QUICK_BATCH_MAX", batches)
    monkeypatch.setattr(speed, "rows_that_fit", partial(speed.rows_that_fit, most=16))  # 6 do
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def last_line(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert run["claims"] == {} or "--quick" not in arguments
    return run


@pytest.mark.parametrize(
    ("line", "parts", "figures", "files"),
    [
        pytest.param(
            *("kvcrush --base average", "overhead", "overhead_fraction kmeans_overhead_fraction"),
            "",
            marks=slow,
        ),
        (
            "eviction --rules sinks:sinks=2;h2o",
            *("cost ready", "cost_h2o eviction_cost_share ready_layer_us", ""),
        ),
        pytest.param(
            *("batch-max", "speed", "bm_over_ed_throughput bm_over_fkv_throughput"),
            "batch-max.json batch-max.md batch-max-static.csv batch-max.svg",
            marks=slow,
        ),
        pytest.param(
            *("quant", "capacity attention throughput"),
            *("int8_attention_speedup int4_capacity_ratio int8_gain_max_batch", ""),
            marks=needs_library,
        ),
        pytest.param(
            "quant --parts attention --codecs int8/int4 --batch 1",
            *("attention", "int8_int4_attention_speedup", ""),
            marks=needs_library,
        ),
        pytest.param(
            *("weights", "random decode", "weights_int8_step_speedup_1 weights_random_int4_kl"),
            "",
            marks=needs_products,
        ),
        pytest.param(
            "rebatch --parts w2,trace --clock cpu",
            *("w2 trace", "w2_batonpd_over_static_b4"),
            "rebatch.json rebatch_w2_b10.csv rebatch_w2_kv.svg rebatch_trace.csv",
            marks=slow,
        ),
        ("gpu --device cpu --parts kernels,rebatch", "kernels rebatch", "rebatch_speedup", ""),
        ("throughput --peers none", "", "quire_tokens_per_s decode_step_over_floor", ""),
        ("throughput", "", "total_ratio_vs_hf_static attention_over_read_ceiling", ""),
        ("invariant --threads 1", "", "invariant_over_plain_decode_4", ""),
        pytest.param(
            "cluster --requests 12",
            *(" ".join(CLUSTER_PARTS), "moderate_kv_aware_hit_fraction", ""),
            marks=slow,
        ),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_quick_run_prints_figures_and_no_claims(line, parts, figures, files, tmp_path):
    out = ["--out", str(tmp_path / "out")] if files else []
    run = last_line(*line.split(), "--quick", "--json", *out)

    assert run["name"] == f"bench {line.split()[0]}"
    assert not parts or list(run["arms"]) == parts.split()
    assert set(figures.split()) <= set(run["quick_figures"])
    assert all(isinstance(value, int | float) for value in run["quick_figures"].values())
    written = {path.name for path in (tmp_path / "out").iterdir()} if files else set()
    assert set(files.split()) <= written


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_roofline_measures_a_cell():
    lowest = sets_of("all")[-1]
    names = ("--weight-codecs", "auto", "--model-impls", "auto", "--instruction-sets", lowest)
    run = last_line("roofline", "--quick", "--json", *names)

    assert run["quick_figures"]["small_batch_step_over_floor"] > 1
    [cell] = run["arms"]["cells"]
    assert cell["instruction_set"] == lowest
    steps = [(step["kind"], step["rows"]) for step in cell["steps"]]
    assert steps == [("prefill", 4), ("decode", 1), ("decode", 4)]


@pytest.mark.slow
def test_answers_are_compared_with_those_in_ample_memory():
    """Swapped sequences are restored byte for byte, and in steps like the others'."""
    run = last_line("differences", "--quick", "--threads", "1", "--json")
    assert run["arms"].keys() == {"none full", "kivi4 full"}
    for found in run["arms"].values():
        assert found["recompute"]["events"] > 0
        assert found["prefix hit"]["events"] > 0
        assert found["recompute"]["of"] == found["batches"]["of"] > 5
    assert run["arms"]["none full"]["recompute"]["logprob"] < 1e-4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kvcrush --quick --base h2p", "h2o"),
        ("eviction --rules h2o;snapkv:windw=3", "window"),
        *(("eviction --rules sinks:sinks=2000", "cap"), ("eviction --parts quality", "ready")),
        *(("quant --codecs int5", "int4"), ("batch-max --dtype bfloat17", "bfloat16")),
        ("rebatch --model huge", "choose from 1100m, 125m"),
        ("rebatch --scale inf", "--scale"),
        ("gpu --device cpu --quick --others nothing", "static"),
        ("gpu --device cpu --quick --parts kernels --attention fast", "gathered"),
        ("throughput --peers vllm", "unknown arm 'vllm'"),
        ("throughput --prompt-tokens 9000", "exceeds the context"),
        ("roofline --instruction-sets avx3", "did you mean avx2"),
        ("roofline --rows 1,0", "expected numbers of sequences"),
        ("cluster --parts pool --loads 1,x", "got '1,x' (--loads)"),
        ("cluster --parts pool --replicas 1,6", "expected powers of two"),
        ("memory --quick --parts waste --trace no.csv", "no.csv"),
        ("offload --repeats 0", "1"),
    ],
)
def test_invalid_options_are_refused(line, message):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code != 0, result.output
    assert message in " ".join(f"{result.exception} {result.output}".split())


# ---- tables and files ----------------------------------------------------------------------------

TABLE = Table(
    name="made",
    caption="What it is.",
    columns=("name", "value"),
    rows=(("a", 1234), ("bb", 0.123456), ("c", None)),
)
BARS = Chart(name="made", title="T", x_label="x", y_label="y", lines={"a": (("p", 1), ("q", 2.5))})


def test_table_renders_in_three_formats(capsys):
    show_parts([("part", PartResult(tables=(TABLE,), claims={}, seconds=0.5))])
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"[│┃]", line)[1:3] for line in lines if line[:1] in ("│", "┃")] == [
        *([" name ", "  value "], [" a    ", "  1,234 "], [" bb   ", " 0.1235 "]),
        [" c    ", "        "],
    ]
    assert report("memory", [TABLE]).splitlines()[4:6] == ["| name | value |", "| --- | ---: |"]
    rows = list(csv.reader(io.StringIO(as_csv(TABLE))))
    assert rows == [["name", "value"], ["a", "1234"], ["bb", "0.123456"], ["c", ""]]


def test_command_writes_tables_pictures_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two parts without work; the first records whether it runs at small size."""
    pytest.importorskip("matplotlib")

    def first(config):
        small = int(config.simulated.requests is not None)
        return PartResult(claims={"small": small}, tables=(TABLE,), charts=(BARS,))

    made = {"waste": first, "beam": lambda _: PartResult(claims={"b": 2}, tables=())}
    monkeypatch.setattr(memory, "PARTS", made)
    files = ("--trace", str(tmp_path / "some.csv"), "--out", str(tmp_path / "out"))

    run = last_line("memory", "--quick", "--json", *files)

    assert run["quick_figures"] == {"small": 1, "b": 2}
    assert [part["claims"] for part in run["arms"].values()] == [{}, {}]
    assert list(run["arms"]) == ["waste", "beam"]
    assert run["config"]["simulated"]["trace"] == "some.csv"
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"memory.json", "memory.md", "made.csv", "made.svg"}
    assert json.loads(written["memory.json"]) == run
    assert written["made.svg"] == svg(BARS)
    result = PartResult(claims={"a": 1.5}, tables=(TABLE,), charts=(BARS,), seconds=2)
    assert PartResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert last_line("memory", "--parts", "beam", "--json")["claims"] == {"b": 2}
    assert names_of("", made) == names_of("beam, waste", made) == ("waste", "beam")
    with pytest.raises(ConfigError, match="each part once"):
        names_of("waste,waste", made)


# ---- offload -------------------------------------------------------------------------------------


CONFIG = replace(
    QUICK_OFFLOAD,
    repeats=1,
    restore_tokens=64,
    engine_tokens=128,
    engine_steps=3,
    gain_rows=4,
    gain_steps=4,
)


PARTS = (
    pytest.param(run_restore, marks=requires_redis),
    run_engine,
    pytest.param(run_engine_gain, marks=pytest.mark.slow),
)
CLAIMS = {
    run_restore: {"restore_gain_vs_load", "restore_gain_vs_load_10gb", "restore_over_alone"},
    run_engine: {"prefill_overhead_fraction", "engine_auto_over_off"},
    run_engine_gain: {"engine_gain_lB_over_prefetch", "engine_gain_throughput_mode"},
}


@pytest.mark.parametrize("run", PARTS, ids=lambda run: run.__name__)
def test_every_part_runs_and_round_trips_through_json(run):
    result = run(CONFIG)

    assert CLAIMS.get(run, set()) <= set(result.claims)
    assert all(isinstance(value, int | float) for value in result.claims.values())
    assert all(len(row) == len(t.columns) for t in result.tables for row in t.rows)
    restored = PartResult.from_json(result.to_json())
    assert restored.tables == result.tables
    if run is run_engine:
        assert result.claims["engine_hosted_bytes"]
    if run is run_engine_gain:
        assert result.claims["engine_gain_lB_over_prefetch_equal"] == 1
        assert result.claims["engine_gain_throughput_mode_equal"] == 1
        assert {row[3] > 0 for row in result.tables[0].rows if row[1] == "lB"} == {True}
        assert {row[3] for row in result.tables[0].rows if row[1] == "prefetch"} == {0}
