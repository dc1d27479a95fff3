"""Whole pieces where lanes hold, keep and lose unequally many tokens: nobody is asked too much."""

import torch

from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.recent import Recent
from quire.policies.view import KVView


def test_a_lane_that_loses_nothing_needs_no_room_for_the_edges_of_pieces():
    """Lanes of unequal caps: one holds 15 and keeps them, fewer than sinks and two edges of 9."""
    short, long = [*range(15), *[-1] * 15], list(range(30))
    view = KVView(torch.tensor([short, long]), next_position=30)

    kept = Recent(sinks=4).select(view, torch.tensor([15, 24]), piece_tokens=10)

    assert kept.sum(dim=1).tolist() == [15, 20]


def test_heads_that_compete_in_pieces_leave_room_for_their_edges():
    """Cap 34: 33 stay, of which half are the newest, 4 sinks; in tens they may widen to 40."""
    rule = make_eviction(
        "h2o:sinks=4,cap=34,every=1,when=decode,granularity=chunk,chunk_tokens=10,budget=ada"
    )
    eviction = rule.for_request(134, LaneShape(1, 2, page_tokens=4, page_bytes=256, fixed_bytes=0))
    [statistic] = rule.statistics
    view = KVView(
        torch.arange(134).expand(2, 134),
        next_position=134,
        heads_per_layer=2,
        statistics={statistic.name: torch.rand(2, 134, generator=torch.manual_seed(0))},
    )

    kept = eviction.select(view, torch.tensor([33, 33]))

    assert 48 <= int(kept.sum()) <= 66
    assert kept[:, :4].all()
    assert kept[:, -4:].all()
