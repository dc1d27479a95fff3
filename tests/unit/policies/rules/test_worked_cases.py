"""Worked examples of policies, each with its arithmetic."""

import pytest
import torch

from quire.layout.statistics import QueryRing
from quire.policies.average import Average
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.lagkv import LagKV
from quire.policies.view import KVView
from support.histories import Slots, history_of_rows, retained_positions

ROWS = [[1.0], [0.6, 0.4], [0.5, 0.2, 0.3], [0.4, 0.1, 0.2, 0.3]]


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


def test_average_divides_the_sum_by_the_age_of_the_token():
    """Batch-Max, section 3.2, after four tokens: current id 3.

    token               0               1               2            3
    sum_weights         1+.6+.5+.4=2.5  .4+.2+.1=.7     .3+.2=.5     .3
    3 + 1 - token       4               3               2            1
    ave_weights         .625            .233            .25          .3

    The lowest are evicted first: 1, then 2, then 3. The sums alone would evict 3, then 2, then 1,
    and so would a divisor larger by one (.5, .175, .167, .15), which counts a future query.
    """
    view = history_of_rows(ROWS).view(Average().statistics)

    assert Average().score(view)[0].tolist() == pytest.approx([0.625, 0.7 / 3, 0.25, 0.3])
    assert [retained(Average(), view, keep) for keep in (3, 2, 1)] == [[0, 2, 3], [0, 3], [0]]


def test_keydiff_of_two_dimensional_keys():
    """Unit keys (1,0), (0,1), (1,0), (.6,.8); their sum (2.6, 1.8), of length 3.162.

    cosines .822, .569, .822, .949: 3 is evicted first, then 2 (ties with 0, which is lower).
    """
    view = view_of([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0], [3.0, 4.0]])

    assert KeyDiff().score(view)[0].tolist() == pytest.approx(
        [-0.82219, -0.56921, -0.82219, -0.94868], abs=1e-4
    )
    assert [retained(KeyDiff(), view, keep) for keep in (3, 2, 1)] == [[0, 1, 2], [0, 1], [1]]
    assert [retained(KNorm(), view, keep) for keep in (3, 2, 1)] == [[0, 1, 2], [0, 2], [2]]


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

    assert policy.least_cap == 4
    assert policy.score(view)[0, :4].tolist() == [0.5, 0.0, 0.0, 0.5]
    assert [retained(policy, view, keep) for keep in (6, 5, 4)] == [
        [0, 1, 3, 4, 5, 6],
        [0, 3, 4, 5, 6],
        [0, 4, 5, 6],
    ]


def ring(queries, window):
    """The ring record of the last queries of one query head."""
    record = torch.zeros(1, window, 3)
    for position, query in list(enumerate(queries))[-window:]:
        record[0, position % window] = torch.tensor([*query, position + 1.0])
    return {QueryRing(window).name: record}
