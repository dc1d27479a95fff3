"""`value_norm`: a rule whose scores are multiplied by the norm of each token's value."""

from dataclasses import dataclass

import pytest
import torch

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import AttentionSum
from quire.policies.base import LANE, LAYER, EvictionPolicy
from quire.policies.h2o import H2O
from quire.policies.registry import make_policy
from quire.policies.tova import TOVA
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from support.histories import Slots, make_history


def two_tokens_view() -> KVView:
    """Attention sums 3 2 1 0 of tokens whose value norms are 1, 5 (3 and 4), 2 and 9."""
    values = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [9.0, 0.0]]])
    return KVView(
        torch.arange(4)[None],
        next_position=4,
        statistics={AttentionSum().name: torch.tensor([[3.0, 2.0, 1.0, 0.0]])},
        slots=Slots(values, values),
    )


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, [3, 10, 2, 0]),  # 3 * 1, 2 * 5, 1 * 2, 0 * 9
        ({"power": 0.0}, [3, 2, 1, 0]),
        ({"power": 2.0}, [3, 50, 4, 0]),
        ({"epsilon": 1.0}, [4, 15, 4, 9]),
    ],
)
def test_scores_are_multiplied_by_value_norms(options, scores) -> None:
    rule = ValueNorm(base=H2O(recent=0), **options)

    assert rule.score(two_tokens_view())[0].tolist() == pytest.approx(scores)


def test_statistics_protection_and_min_cap_are_those_of_the_base() -> None:
    rule = make_policy("value_norm:base=(h2o:recent=7,sinks=2,heads=max),power=2")

    assert rule.base == H2O(recent=7, sinks=2, heads="max")
    assert rule.power == 2
    assert rule.statistics == (AttentionSum("max"),)
    assert rule.min_cap == 10
    assert ValueNorm(base=TOVA()).scope == LAYER

    view = make_history(tokens=40, group=2, layers=(1, 2)).view(rule.statistics)
    keep = torch.full((view.positions.shape[0],), 12)
    assert rule.protected(view, keep).equal(rule.base.protected(view, keep))


@pytest.mark.parametrize("base", ["h2o", "average", "roco", "snapkv:window=4", "tova", "sinks"])
def test_power_zero_equals_the_base_rule(base: str) -> None:
    wrapped, alone = make_policy(f"value_norm:base=({base}),power=0"), make_policy(base)
    history = make_history(tokens=60, group=2, layers=(1, 2), ragged=alone.scope == LANE)
    view = history.view(alone.statistics)
    keep = torch.full((view.positions.shape[0],), 20)

    assert wrapped.select(view, keep).equal(alone.select(view, keep))


def test_value_norm_can_be_nested() -> None:
    rule = make_policy("value_norm:base=(value_norm:base=(h2o:recent=0))")

    assert rule.score(two_tokens_view())[0].tolist() == pytest.approx([3, 50, 4, 0])


def test_base_with_negative_scores_is_refused_by_name() -> None:
    rule = make_policy("value_norm:base=knorm")

    with pytest.raises(PolicyError, match="KNorm returned negative ones; use a base whose scores"):
        rule.select(two_tokens_view(), torch.tensor([3]))


@dataclass(frozen=True)
class Unscored(EvictionPolicy):
    def select(self, view, keep, piece_tokens=1):
        return view.live


def test_base_without_scores_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="value_norm multiplies scores, and Unscored returns none"
    ):
        ValueNorm(base=Unscored())


@pytest.mark.parametrize("option", ["power", "epsilon"])
def test_negative_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} >= 0"):
        make_policy(f"value_norm:{option}=-1")
