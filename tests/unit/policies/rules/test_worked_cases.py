"""Worked examples of policies, each with its arithmetic."""

import pytest
import torch

from quire.layout.statistics import QueryRing
from quire.policies.average import Average
from quire.policies.h2o import H2O
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.lagkv import LagKV
from quire.policies.scissorhands import Scissorhands
from quire.policies.snapkv import SnapKV
from quire.policies.tova import TOVA
from quire.policies.view import KVView
from quire.policies.windows import pool
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


def test_h2o_retains_the_heavy_half_and_the_newest_half():
    """Sums 2.5, .7, .5, .3. Of 3 retained 3 // 2 = 1 is the newest; 0, 1 have the largest sums."""
    view = history_of_rows(ROWS).view(H2O().statistics)

    assert [retained(H2O(), view, keep) for keep in (3, 2, 1)] == [[0, 1, 3], [0, 3], [0]]
    assert [retained(H2O(recent=0), view, keep) for keep in (3, 2, 1)] == [[0, 1, 2], [0, 1], [0]]


def test_h2o_with_squares_prefers_one_large_weight_to_many_small_ones():
    """Token 1 has .3 + .3 + .3 = .9 (squares .27), token 2 has .6 + .1 = .7 (squares .37)."""
    view = history_of_rows([[1.0], [0.7, 0.3], [0.1, 0.3, 0.6], [0.1, 0.3, 0.1, 0.5]]).view(
        [*H2O().statistics, *H2O(power=2).statistics]
    )

    assert retained(H2O(recent=0), view, 2) == [0, 1]
    assert retained(H2O(recent=0, power=2), view, 2) == [0, 2]


def test_scissorhands_counts_weights_below_one_over_the_keys_seen():
    """Thresholds 1, 1/2, 1/3, 1/4.

    query 0    1.0 is not below 1
    query 1    .4 < 1/2: token 1
    query 2    .2 < 1/3: token 1; .3 < 1/3: token 2
    query 3    .1 < 1/4: token 1; .2 < 1/4: token 2

    Counts 0, 3, 2, 0: 1 is evicted first, then 2; 0 and 3 tie, and the lower is retained.
    """
    policy = Scissorhands(recent=0)
    view = history_of_rows(ROWS).view(policy.statistics)

    assert policy.score(view)[0].tolist() == [0, -3, -2, 0]
    assert [retained(policy, view, keep) for keep in (3, 2, 1)] == [[0, 2, 3], [0, 3], [0]]


def test_scissorhands_by_share_is_independent_of_age():
    """Shares of low weights: 0/4, 3/3, 2/2, 0/1; by count 2 is better than 1, by share they tie."""
    policy = Scissorhands(recent=0, share=True)
    view = history_of_rows(ROWS).view(policy.statistics)

    assert policy.score(view)[0].tolist() == [0, -1, -1, 0]
    assert retained(policy, view, 3) == [0, 1, 3]


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


def test_lagkv_partitions_start_after_the_sinks():
    """Nine tokens, lag 2, 2 sinks: (2 3) (4 5) (6 7), and 8: the tokens above, two later."""
    policy = LagKV(sinks=2, lag=2)
    keys = [[2.0, 0.0], [1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]
    view = view_of([[50.0, -50.0], [7.0, 7.0], *keys])

    assert retained(policy, view, 7) == [0, 1, 2, 5, 6, 7, 8]


def test_average_pooling_divides_by_the_kernel_at_the_ends():
    """Kernel 3 over 6 0 0 0 3: (0+6+0)/3, (6+0+0)/3, 0, (0+0+3)/3, (0+3+0)/3."""
    sums = torch.tensor([[[6.0, 0.0, 0.0, 0.0, 3.0]]])

    assert pool(sums, 3, "avg").flatten().tolist() == [2, 2, 0, 1, 1]
    assert pool(sums, 3, "max").flatten().tolist() == [6, 6, 0, 3, 3]


def ring(queries, window):
    """The ring record of the last queries of one query head."""
    record = torch.zeros(1, window, 3)
    for position, query in list(enumerate(queries))[-window:]:
        record[0, position % window] = torch.tensor([*query, position + 1.0])
    return {QueryRing(window).name: record}


def test_tova_uses_the_last_query_only():
    """Query (1, 0) at position 3: logits are the first elements of the keys, 0, 2, 1, 3."""
    queries = [(0.0, 9.0), (0.0, 9.0), (0.0, 9.0), (1.0, 0.0)]
    view = view_of(
        [[0.0, 5.0], [2.0, -5.0], [1.0, 5.0], [3.0, 0.0]], statistics=ring(queries, window=1)
    )

    assert [retained(TOVA(), view, keep) for keep in (3, 2, 1)] == [[1, 2, 3], [1, 3], [3]]


def test_snapkv_uses_the_window_queries_and_pools_only_earlier_tokens():
    """Six tokens, window 2; both queries are (1, 0), so weights follow the first elements.

    Before the window 0, 0, 9, 0: nearly all weight is on token 2. Pooling by 3 raises 1 and 3 to
    it. Tokens of the window (here 9 each) are not pooled: they would raise 3 above 1.
    """
    keys = [[0.0, 0.0], [0.0, 0.0], [9.0, 0.0], [0.0, 0.0], [9.0, 0.0], [9.0, 0.0]]
    view = view_of(keys, statistics=ring([(1.0, 0.0)] * 6, window=2))

    assert retained(SnapKV(window=2, kernel=1), view, 3) == [2, 4, 5]
    assert retained(SnapKV(window=2, kernel=3, pooling="max"), view, 4) == [1, 2, 4, 5]
    assert retained(SnapKV(window=2, kernel=3), view, 5) == [1, 2, 3, 4, 5]
