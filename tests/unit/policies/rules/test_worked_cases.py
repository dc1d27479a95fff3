"""Worked examples of LagKV and TriAttention with their arithmetic."""

from dataclasses import replace

import torch

from quire.layout.statistics import QueryMoments
from quire.policies.lagkv import LagKV
from quire.policies.triattention import TriAttention
from quire.policies.view import KVView
from support.histories import Slots, retained_positions


def retained(policy, view, keep):
    [lane] = retained_positions(view, policy.select(view, torch.tensor([keep])))
    return lane


def view_of(keys, values=None, statistics=None):
    """One lane of two-dimensional keys."""
    keys = torch.tensor([keys], dtype=torch.float32)
    values = torch.zeros_like(keys) if values is None else torch.tensor([values])
    return KVView(
        positions=torch.arange(keys.shape[1])[None],
        next_position=keys.shape[1],
        slots=Slots(keys, values),
        head_dim=2,
        statistics=statistics or {},
    )


def test_lagkv_scores_of_partitions():
    """Seven tokens, lag 2, no sinks: partitions (0 1) (2 3) (4 5), then 6.

    (0 1) by the next partition's least (0, 0) and width (2, 4): keys (2, 0) -> (1, 0), whose std
    with n - 1 is .71; (1, 2) -> (.5, .5), std 0: ranks 1, 0. (2 3) by the least (0, 0) and width
    (1, 1): (0, 0) has std 0, (2, 4) has 1.41: ranks 0, 1. All values are equal, width 0: no spread.
    Scores 1/2, 0, 0, 1/2; 4, 5 and 6 are retained. Evict 2 first (ties with 1), then 1, then 3.
    """
    policy = LagKV(sinks=0, lag=2)
    view = view_of(
        [[2.0, 0.0], [1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]
    )

    assert policy.min_cap == 4
    assert policy.score(view)[0, :4].tolist() == [0.5, 0.0, 0.0, 0.5]
    assert [retained(policy, view, keep) for keep in (6, 5, 4)] == [
        [0, 1, 3, 4, 5, 6],
        [0, 3, 4, 5, 6],
        [0, 4, 5, 6],
    ]


class QuarterTurns:
    """RoPE of one band with w = pi / 2."""

    def mean_rotation(self, layer, positions):
        del layer
        turns = [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)]
        cosine, sine = torch.tensor([turns[p % 4] for p in positions]).mean(dim=0)
        return torch.stack([torch.stack([cosine, -sine]), torch.stack([sine, cosine])])


def test_triattention_adds_the_series_and_the_norms():
    """Two queries with the sum (2, 0) and squares of 4.5: centre (1, 0), root mean square 1.5.

    Positions 5 and 6 turn the centre to (0, 1) and (-1, 0), on average (-0.5, 0.5). Each key adds
    1.5 - 1 = 0.5 of its norm:

        (0, 2)     1 + 1 = 2          (0, -2)   -1 + 1 = 0       (1, 1)   0 + 0.71 = 0.71
        (2, 0)    -1 + 1 = 0          (-4, 0)    2 + 2 = 4

    Their mean is 1.34, their scores have mean 0 and variance 1, and the order is that of S.
    """
    policy = TriAttention(sinks=0, max_offset=2)
    [sums] = policy.statistics
    assert sums == QueryMoments(skip=0, squares=True)
    view = replace(
        view_of(
            [[0.0, 2.0], [2.0, 0.0], [0.0, -2.0], [-4.0, 0.0], [1.0, 1.0]],
            statistics={sums.name: torch.tensor([[[2.0, 2.0, 0.0, 4.5, 0.0]]])},
        ),
        rotation=QuarterTurns(),
    )

    expected = torch.tensor([2.0, 0.0, 0.0, 4.0, 0.5 * 2**0.5])
    score = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(policy.score(view)[0], score)
    assert retained(policy, view, 3) == [0, 3, 4]
