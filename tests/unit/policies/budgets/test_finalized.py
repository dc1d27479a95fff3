"""Budgets finalized from the cache of the prompt: squeeze, lazy, fastgen."""

from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import AttentionSum, QueryRing, ResidualSimilarity
from quire.policies.base import SinksAndRecent
from quire.policies.budgets.base import UNBOUNDED, Shape
from quire.policies.budgets.fastgen import FastGen
from quire.policies.budgets.lazy import Lazy
from quire.policies.budgets.squeeze import Squeeze, highest_cluster
from quire.policies.registry import make_budget
from quire.policies.view import KVView


@dataclass(frozen=True)
class Stored:
    """Stored keys and values."""

    stored: torch.Tensor

    def keys(self) -> torch.Tensor:
        return self.stored

    def values(self) -> torch.Tensor:
        return self.stored


@dataclass(frozen=True)
class ByAttention(SinksAndRecent):
    """Scores a slot by its accumulated attention."""

    def score(self, view: KVView) -> torch.Tensor:
        return view.statistic(AttentionSum())


def shape_of(
    cap: int,
    layers: int,
    *,
    heads: int = 1,
    least: int = 1,
    leaving: int = 0,
    bounded: bool = False,
) -> Shape:
    return Shape(
        cap=cap,
        leaving=leaving,
        num_layers=layers,
        heads=heads,
        prompt_tokens=99,
        least=least,
        bounded=bounded,
    )


# ---- within the total cap ------------------------------------------------------------------------


def test_unbounded_caps_share_what_the_others_leave() -> None:
    """Four lanes of cap 10: 4 and 8 leave 28, for two lanes; three lanes leave 40 - 5 for three."""
    shape = shape_of(10, 4)

    assert shape.within_total([4, UNBOUNDED, 8, UNBOUNDED]) == (4, 14, 8, 14)
    assert shape.within_total([UNBOUNDED, 5, UNBOUNDED, UNBOUNDED]) == (12, 5, 12, 11)
    assert shape.within_total([4, 10, 8, 10]) == (4, 10, 8, 10)
    assert shape.within_total([UNBOUNDED] * 4) == (10,) * 4


# ---- groups of layers ----------------------------------------------------------------------------


def tightest(numbers: list[float], groups: int) -> float:
    """The least sum of squared distances from means, of all ways to cut the sorted numbers."""
    ranked = sorted(numbers)
    cuts = combinations(range(1, len(ranked)), min(groups, len(set(ranked))) - 1)
    groupings = [
        [ranked[start:end] for start, end in pairwise((0, *cut, len(ranked)))] for cut in cuts
    ]
    return min(sum(map(spread, grouping)) for grouping in groupings)


def spread(numbers: list[float]) -> float:
    return sum((number - sum(numbers) / len(numbers)) ** 2 for number in numbers)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(2, 4))
def test_highest_cluster_belongs_to_an_optimal_grouping(integers: list[int], groups: int) -> None:
    numbers = [float(number) for number in integers]

    found = highest_cluster(numbers, groups)

    inside = [number for i, number in enumerate(numbers) if i in found]
    outside = [number for i, number in enumerate(numbers) if i not in found]
    assert max(outside, default=-1) < min(inside)
    assert bool(outside) == (len(set(numbers)) > 1)
    rest = tightest(outside, min(groups, len(set(numbers))) - 1) if outside else 0
    assert spread(inside) + rest == pytest.approx(tightest(numbers, groups), abs=1e-9)


# ---- squeeze -------------------------------------------------------------------------------------


def view_with_cosines(cosines: list[float], heads: int = 1, tokens: int = 50) -> KVView:
    record = torch.tensor([[[c * tokens, tokens]] for c in cosines for _ in range(heads)])
    return KVView(
        torch.zeros(len(record), 1, dtype=torch.long),
        next_position=1,
        heads_per_layer=heads,
        statistics={ResidualSimilarity().name: record},
    )


def test_squeeze_worked_example() -> None:
    """Cosines 0.2 0.5 0.9 0.91: the last two shrink; 0.3 * 100 = 30, (4 - 0.6) * 100 / 2 = 170."""
    view = view_with_cosines([0.2, 0.5, 0.9, 0.91], heads=2)

    caps = Squeeze().finalize(view, ByAttention(), shape_of(100, 4, heads=2))

    assert caps == (170, 170, 170, 170, 30, 30, 30, 30)


def test_squeeze_does_not_shrink_protected_tokens() -> None:
    """20 of 100 are protected: 0.5 * 80 + 20 = 60 and (2 - 0.5) * 80 + 20 = 140."""
    view = view_with_cosines([0.1, 0.9])

    assert Squeeze(share=0.5, groups=2).finalize(
        view, ByAttention(), shape_of(100, 2, least=21)
    ) == (140, 60)


def test_equal_cosines_give_equal_caps() -> None:
    caps = Squeeze().finalize(view_with_cosines([0.5] * 3), ByAttention(), shape_of(100, 3))

    assert caps == (100, 100, 100)


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(40, 500),
    st.integers(1, 30),
    st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_squeeze_keeps_the_total(cosines, heads, cap, least, share) -> None:
    shape, budget = shape_of(cap, len(cosines), heads=heads, least=least), Squeeze(share=share)

    reserved = budget.lane_capacities(shape)
    caps = budget.finalize(view_with_cosines(cosines, heads), ByAttention(), shape)

    assert sum(caps) == cap * shape.num_lanes
    assert min(caps) >= least
    assert all(cap <= most for cap, most in zip(caps, reserved, strict=True))


def test_layer_without_recorded_similarity_raises_an_error() -> None:
    view = view_with_cosines([0.2, 0.5], tokens=0)

    with pytest.raises(PolicyError, match="some layer has recorded none; use another budget"):
        Squeeze().finalize(view, ByAttention(), shape_of(100, 2))


def test_too_small_squeeze_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives some layers no tokens besides the 8"):
        Squeeze(share=0.1).lane_capacities(shape_of(17, 3, least=9))

    assert Squeeze(share=0.1).lane_capacities(shape_of(18, 3, least=9)) == (8 + 28,) * 3


# ---- lazy ----------------------------------------------------------------------------------------


def view_with_masses(far: list[float], tokens: int = 10) -> KVView:
    """One head a layer; its last query gives `far` of its attention to the token at position 3."""
    ring = QueryRing(window=1)
    keys = torch.zeros(len(far), tokens, 1)
    for layer, mass in enumerate(far):
        # softmax of one product x against tokens - 1 zeros is mass
        keys[layer, 3, 0] = torch.tensor(mass * (tokens - 1) / (1 - mass)).log()
    record = torch.tensor([[[1.0, tokens]]] * len(far))  # the query 1, at the last position
    return KVView(
        torch.arange(tokens).expand(len(far), tokens),
        next_position=tokens,
        statistics={ring.name: record},
        slots=Stored(keys),
        head_dim=1,
    )


def test_lazy_caps_layers_with_local_attention_only() -> None:
    """Ten tokens, cap 9 with one sink and the newest 8 (2 to 9): only position 1 is far.

    Cap 7: the sink and 4 to 9; positions 1, 2, 3 are far, of which 3 has 0.05 or 0.5 and the other
    nine divide the rest: 0.95 * 7 / 9 = 0.739 near, and 0.5 * 7 / 9 = 0.389.
    """
    view, budget = view_with_masses([0.05, 0.5]), Lazy(threshold=0.7, sinks=1, last=1)

    assert budget.finalize(view, ByAttention(), shape_of(7, 2)) == (7, UNBOUNDED)
    assert budget.finalize(view, ByAttention(), shape_of(9, 2, leaving=2)) == (9, UNBOUNDED)
    assert Lazy(threshold=0.74, sinks=1, last=1).finalize(view, ByAttention(), shape_of(7, 2)) == (
        UNBOUNDED,
        UNBOUNDED,
    )
    assert Lazy(threshold=0.38, sinks=1, last=1).finalize(view, ByAttention(), shape_of(7, 2)) == (
        7,
        7,
    )


@given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_higher_lazy_threshold_caps_no_more_layers(
    far: list[float], first: float, second: float
) -> None:
    view, shape = view_with_masses(far), shape_of(6, len(far))

    low, high = (
        Lazy(threshold=threshold, sinks=1, last=1).finalize(view, ByAttention(), shape)
        for threshold in sorted((first, second))
    )

    assert all(a <= b for a, b in zip(low, high, strict=True))


def test_bounded_lazy_layers_retain_the_fewest_tokens_above_the_threshold() -> None:
    """Ten tokens. Layer 0: position 3 has 0.05, each other 0.106; six have 0.633: a sink, 5 to 9.

    Layer 1: position 3 has 0.5, each other 0.056; a sink and 4 to 9 have 0.389, below 0.6. Of 14
    tokens layer 0 retains 6 and layer 1 the others. If an eviction removes 2, layer 0 holds 8.
    """
    view, budget = view_with_masses([0.05, 0.5]), Lazy(threshold=0.6, sinks=1, last=1)

    assert budget.finalize(view, ByAttention(), shape_of(7, 2, bounded=True)) == (6, 8)
    shape = shape_of(9, 2, leaving=2, bounded=True)
    assert budget.finalize(view, ByAttention(), shape) == (8, 10)
    shape = shape_of(7, 2, least=7, bounded=True)
    assert budget.finalize(view, ByAttention(), shape) == (7, 7)
    all_lazy = Lazy(threshold=0.3, sinks=1, last=1)
    assert all_lazy.finalize(view, ByAttention(), shape_of(7, 2, bounded=True)) == (7, 7)


@given(
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(3, 12),
    st.integers(1, 2),
)
def test_bounded_lazy_caps_are_within_the_total(
    far: list[float], threshold: float, cap: int, least: int
) -> None:
    shape = shape_of(cap, len(far), least=least, bounded=True)
    budget = Lazy(threshold=threshold, sinks=1, last=1)

    caps = budget.finalize(view_with_masses(far), ByAttention(), shape)

    assert sum(caps) <= cap * len(far)
    assert min(caps) >= least


def test_lazy_needs_a_cap_above_its_sinks() -> None:
    with pytest.raises(
        ConfigError, match="needs more than its 4 sinks in a lane after an eviction, got 4 tokens"
    ):
        Lazy().lane_capacities(shape_of(12, 2, leaving=8))

    assert Lazy().lane_capacities(shape_of(13, 2, leaving=8)) == (UNBOUNDED, UNBOUNDED)


# ---- fastgen -------------------------------------------------------------------------------------


def test_fastgen_selects_the_smallest_cap_that_recovers_attention() -> None:
    """Ten slots, one sink and two recent protected; least = 4, cap = 6; 0.9 must be recovered.

    Head 0: protected slots have 95 of 100. Head 1: they have 40, the best three others 30 20 5:
    with one more 70, with three more 95. Head 2: all have the same 10, so six have 60.
    """
    received = torch.tensor(
        [[60.0, 1, 1, 1, 1, 1, 0, 0, 20, 15], [20.0, 30, 20, 5, 1, 1, 1, 2, 10, 10], [10.0] * 10]
    )
    view = KVView(
        torch.arange(10).expand(3, 10),
        next_position=10,
        heads_per_layer=3,
        statistics={AttentionSum().name: received},
    )
    rule = ByAttention(sinks=1, recent=2)

    caps = FastGen(share=0.9).finalize(view, rule, shape_of(6, 1, heads=3, least=4))

    assert caps == (4, 6, UNBOUNDED)


def test_bounded_fastgen_heads_share_what_the_others_leave() -> None:
    """The heads of the example above: 4, 6, and of 3 * 6 tokens the other 8."""
    received = torch.tensor([[60.0, 1, 1, 1, 1, 1, 0, 0, 20, 15], [10.0] * 10])
    view = KVView(
        torch.arange(10).expand(2, 10),
        next_position=10,
        heads_per_layer=2,
        statistics={AttentionSum().name: received},
    )
    rule = ByAttention(sinks=1, recent=2)
    shape = shape_of(6, 1, heads=2, least=4, bounded=True)

    assert FastGen(share=0.9).finalize(view, rule, shape) == (4, 8)


def test_fastgen_measures_heads_of_unequal_length_on_their_own_slots() -> None:
    """Head 1 holds four tokens, as many as the least cap: they have all of its attention."""
    positions = torch.tensor([list(range(10)), [0, 7, 8, 9, *[-1] * 6]])
    received = torch.tensor([[10.0] * 10, [5.0, 5, 5, 5, *[0.0] * 6]])
    view = KVView(
        positions, next_position=10, heads_per_layer=2, statistics={AttentionSum().name: received}
    )
    shape = shape_of(6, 1, heads=2, least=4, bounded=True)

    caps = FastGen(share=0.9).finalize(view, ByAttention(sinks=1, recent=2), shape)

    assert caps == (8, 4)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=1, max_size=4),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.integers(4, 12),
    st.integers(0, 1),
)
def test_fastgen_caps_recover_the_share_of_attention(received, share, cap, leaving) -> None:
    attention = torch.tensor(received, dtype=torch.float32)
    view = KVView(
        torch.arange(8).expand(len(received), 8),
        next_position=8,
        heads_per_layer=len(received),
        statistics={AttentionSum().name: attention},
    )
    rule = ByAttention(sinks=1, recent=1)
    shape = shape_of(cap, 1, heads=len(received), least=3 + leaving, leaving=leaving)

    caps = FastGen(share=share).finalize(view, rule, shape)

    assert set(caps) <= {shape.least, shape.cap, UNBOUNDED}
    for lane, lane_cap in enumerate(caps):
        keep = torch.full((len(received),), min(8, lane_cap - leaving))
        recovered = (attention * rule.select(view, keep))[lane].sum()
        assert recovered >= share * attention[lane].sum()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("squeeze:share=0", "0 < share <= 1"),
        ("squeeze:groups=1", "2 groups or more"),
        ("lazy:threshold=2", "0 <= threshold <= 1"),
        ("lazy:sinks=-1", "sinks >= 0"),
        ("lazy:last=0", "window of at least 1 query"),
        ("fastgen:share=1.5", "0 < share <= 1"),
    ],
)
def test_invalid_budget_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_budget(text)
