"""A rule sees the lanes of all ranks, and each rank gets its part of the decision."""

import pytest
import torch

from quire.errors import PolicyError
from quire.eviction.decisions import AllHeads
from quire.layout.statistics import AttentionSum
from quire.policies.view import KVView
from support.ranks import ThreadGroup, on_ranks

LAYERS, HEADS, SLOTS, DIM = 3, 4, 5, 2
LANES = LAYERS * HEADS


class Vectors:
    """Keys and values of some lanes."""

    def __init__(self, lanes: torch.Tensor) -> None:
        self._lanes = lanes

    def keys(self) -> torch.Tensor:
        return self._lanes[:, None, None].expand(-1, SLOTS, DIM).float()

    def values(self) -> torch.Tensor:
        return -self.keys()


def own_lanes(rank: int, size: int) -> torch.Tensor:
    """Numbers of a rank's lanes among those of all ranks."""
    heads = HEADS // size
    first = rank * heads
    return torch.arange(LANES).view(LAYERS, HEADS)[:, first : first + heads].flatten()


def view_of(lanes: torch.Tensor, heads: int) -> KVView:
    return KVView(
        positions=torch.arange(SLOTS).expand(len(lanes), -1) + lanes[:, None],
        next_position=SLOTS,
        heads_per_layer=heads,
        layers=tuple(range(LAYERS)),
        statistics={"attention_sum.mean": lanes[:, None].expand(-1, SLOTS).float()},
        slots=Vectors(lanes),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_view_is_that_of_one_rank(size: int) -> None:
    expected = view_of(torch.arange(LANES), HEADS)

    def seen(group: ThreadGroup) -> KVView:
        own = view_of(own_lanes(group.rank, size), HEADS // size)
        view = AllHeads(group, LAYERS).view(own)
        assert torch.equal(view.keys, expected.keys)
        assert torch.equal(view.values, expected.values)
        return view

    for view in on_ranks(size, seen):
        assert view.heads_per_layer == HEADS
        assert torch.equal(view.positions, expected.positions)
        assert torch.equal(view.statistic(AttentionSum()), expected.statistic(AttentionSum()))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_part_of_a_decision(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(LANES, SLOTS, generator=generator).argsort(dim=1) < 3

    def part(group: ThreadGroup) -> None:
        found = AllHeads(group, LAYERS).own_part(mask)
        assert torch.equal(found, mask[own_lanes(group.rank, size)])

    on_ranks(size, part)


def test_unequal_ranks_are_refused() -> None:
    mask = torch.ones(LANES, SLOTS, dtype=torch.bool)
    mask[HEADS - 1, 0] = False  # a head of the last rank

    def part(group: ThreadGroup) -> None:
        with pytest.raises(PolicyError, match="different numbers of tokens"):
            AllHeads(group, LAYERS).own_part(mask)

    on_ranks(2, part)
