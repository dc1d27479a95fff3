"""`python -m benchmarks eviction`: computation on given values, and small runs."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import eviction
from benchmarks.__main__ import app
from benchmarks.eviction import (
    READY_ARMS,
    CostConfig,
    EvictionBenchConfig,
    StepCost,
    ready_claims,
)


def test_cost_claims_match_hand_computation():
    def found(**arms: tuple[float, float]) -> dict[str, StepCost]:
        return {
            a: StepCost(arm=a, step_s=s, schedule_s=p, cpu_s=2 * s) for a, (s, p) in arms.items()
        }

    rounds = [
        found(
            full=(10.0, 1.0),
            again=(9.9, 1.0),
            recent=(10.0, 2.0),
            rule=(12.5, 1.5),
            h2o=(11.0, 1.5),
            pressure_recent=(10.05, 1.0),
            pressure_rule=(10.5, 1.0),
        )
    ]

    assert eviction.claims(rounds) == {
        "cost_h2o": pytest.approx(0.1),
        "eviction_cost_share": 0.04,
        "statistics_cost_share": pytest.approx(11 / 8 - 1),
        "pressure_recent_cost": pytest.approx(0.005),
        "pressure_rule_cost": pytest.approx(0.05),
        "equal_arms_difference": pytest.approx(-0.01),
    }


def test_cost_arms_decode_equally_many_steps():
    others = ("sinks:sinks=2",)
    config = CostConfig(model="tiny", others=others, cap=32, every=4, rows=2, repeats=1)

    [found] = eviction.measure_cost(config)

    assert list(found) == [
        "full",
        "again",
        "recent",
        "rule",
        "sinks_sinks_2",
        "pressure_recent",
        "pressure_rule",
    ]
    for one in found.values():
        assert 0 < one.schedule_s < one.step_s
    assert eviction.run_cost(config).tables[0].rows[3][0] == (
        "average:cap=32,every=4,when=prefill_and_decode"
    )


def test_ready_claims_are_median_differences_per_layer():
    """Steps of 10 and 10.4, 10 and 10.8, 10 and 14 ms in 4 layers: 0.8 / 4 ms are 200 us."""

    def found(full_ms: float, ready_ms: float) -> dict[str, StepCost]:
        times = {"full": full_ms, "again": full_ms, "pressure_recent": ready_ms}
        return {
            a: StepCost(arm=a, step_s=ms / 1e3, schedule_s=0.0, cpu_s=0.0)
            for a, ms in times.items()
        }

    rounds = [found(10, 10.4), found(10, 10.8), found(10, 14)]

    assert ready_claims(rounds, 4) == {
        "ready_layer_us": pytest.approx(200),
        "ready_equal_layer_us": 0,
    }


def test_only_requested_arms_are_timed():
    [found] = eviction.measure_cost(
        CostConfig(model="tiny", others=(), cap=8, every=2, rows=1, repeats=1), READY_ARMS
    )

    assert tuple(found) == READY_ARMS


def test_full_size_config_matches_the_claims():
    cost = EvictionBenchConfig().cost

    assert (cost.cap, cost.every, cost.rows) == (1_024, 64, 32)


def test_command_prints_both_parts_with_the_given_rules(monkeypatch: pytest.MonkeyPatch):
    tiny = CostConfig(model="tiny", others=(), cap=32, every=4, rows=2, repeats=1)
    monkeypatch.setattr(eviction, "QUICK_EVICTION", EvictionBenchConfig(cost=tiny, ready=tiny))

    arguments = ["eviction", "--quick", "--json", "--rules", "sinks:sinks=2; h2o"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert list(run["arms"]) == ["cost", "ready"]
    assert {"cost_h2o", "eviction_cost_share", "ready_layer_us"} <= set(run["quick_figures"])
    assert run["config"]["cost"]["rule"] == "sinks:sinks=2"
    assert run["config"]["threads"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "h2p"), "h2o"),
        (("--rules", "h2o; snapkv:windw=3"), "window"),
        (("--rules", "sinks:sinks=2000"), "cap"),
        (("--parts", "quality"), "ready"),
    ],
)
def test_command_refuses_invalid_values(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["eviction", *arguments])

    assert result.exit_code != 0, result.output
    assert message in " ".join(f"{result.exception} {result.output}".split())
