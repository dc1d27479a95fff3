"""`python -m benchmarks cluster`: the loads it simulates, and its output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cluster.parts import PARTS
from benchmarks.cluster.runs import (
    QUICK_CLUSTER,
    ClusterBenchConfig,
    at_load,
    for_replicas,
    one_machine,
)
from support.sim_traces import request, trace

TALK = trace(*(request(i, i * 0.5, 9, 20, shared=[(0, 32), (1 + i % 8, 32)]) for i in range(1, 41)))


@given(factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_load_scales_arrivals_only(factor):
    faster = at_load(TALK, factor)

    assert [r.arrival_s * factor for r in faster.requests] == pytest.approx(
        [r.arrival_s for r in TALK.requests]
    )
    assert [r.prompt for r in faster.requests] == [r.prompt for r in TALK.requests]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16, 64])
def test_load_of_more_replicas_has_more_conversations(replicas):
    load = for_replicas(TALK, replicas, 8)

    assert len(load.requests) == 40 * replicas / 8
    assert len({r.prompt[1].content for r in load.requests}) == replicas
    assert [r.arrival_s for r in load.requests] == sorted(r.arrival_s for r in load.requests)
    assert load.requests[0].arrival_s == 0
    # every conversation is whole
    assert {sum(r.prompt[1] == q.prompt[1] for r in load.requests) for q in load.requests} == {5}


def test_one_machine_has_everything_of_all_replicas():
    bench = ClusterBenchConfig(replicas=4)
    one, all_of_them = bench.engine(), one_machine(bench)

    assert all_of_them.kv.memory == 4 * one.kv.memory
    assert all_of_them.rates.flops_per_s == 4 * one.rates.flops_per_s
    assert all_of_them.schedule.max_num_seqs == 4 * one.schedule.max_num_seqs


@pytest.mark.slow
def test_quick_run_prints_tables_and_supports_no_claims():
    done = CliRunner().invoke(app, ["cluster", "--quick", "--requests", "12", "--json"])
    run = json.loads(done.stdout.splitlines()[-1])

    assert done.exit_code == 0
    assert run["claims"] == {}
    assert list(run["arms"]) == list(PARTS)
    assert 0 <= run["quick_figures"]["moderate_kv_aware_hit_fraction"] < 1
    assert len(run["arms"]["scale"]["tables"][0]["rows"]) == 3 * len(QUICK_CLUSTER.sizes)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--loads", "1"), "expected two loads above 0"),
        (("--loads", "1,x"), "got '1,x' (--loads)"),
        (("--replicas", "1,6"), "expected powers of two"),
    ],
)
def test_invalid_options_are_refused(option, message):
    done = CliRunner().invoke(app, ["cluster", "--parts", "pool", *option])

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_scaled_lengths_have_scaled_memory_blocks_and_times():
    whole, small = ClusterBenchConfig(requests=50, length_scale=1), ClusterBenchConfig(requests=50)

    assert small.memory_bytes == whole.memory_bytes / 8
    assert (whole.block_tokens, small.block_tokens) == (512, 64)
    last = [bench.load().requests[-1].arrival_s for bench in (whole, small)]
    assert last[1] == pytest.approx(last[0] / 8)
