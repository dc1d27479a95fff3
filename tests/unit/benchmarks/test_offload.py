"""`python -m benchmarks offload`: results of the parts."""

from dataclasses import replace

import pytest

from benchmarks.common.result import PartResult
from benchmarks.offload.config import QUICK_OFFLOAD
from benchmarks.offload.engine import run_engine, run_engine_gain
from benchmarks.offload.restore import run_restore
from support.redis_servers import requires_redis

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
