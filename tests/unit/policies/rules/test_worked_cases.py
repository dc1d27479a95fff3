"""A worked example of LagKV with its arithmetic."""

import torch

from quire.policies.lagkv import LagKV
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
