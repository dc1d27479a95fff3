"""Whole pieces in lanes of different lengths and caps."""

import torch

from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.recent import Recent
from quire.policies.view import KVView


def test_lane_without_evictions_needs_no_slots_for_piece_edges():
    """Different caps: one lane retains all of its 15, fewer than sinks and two edges of 9."""
    short, long = [*range(15), *[-1] * 15], list(range(30))
    view = KVView(torch.tensor([short, long]), next_position=30)

    retained = Recent(sinks=4).select(view, torch.tensor([15, 24]), piece_tokens=10)

    assert retained.sum(dim=1).tolist() == [15, 20]


def test_ada_with_pieces_stays_within_the_layer_total():
    """Cap 34: 33 retained, half of them the newest, 4 sinks; in pieces of ten up to 40."""
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

    retained = eviction.select(view, torch.tensor([33, 33]))

    assert 48 <= int(retained.sum()) <= 66
    assert retained[:, :4].all()
    assert retained[:, -4:].all()
