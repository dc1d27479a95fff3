"""Fronts divided: whole pages, sums as asked, no page in two places."""

from hypothesis import given
from hypothesis import strategies as st

from quire.offload.kv.prefix_splits import OffloadedPrefix, Share, divide_prefixes

PAGE = 4


@st.composite
def prefixes(draw):
    found = {}
    for row in range(draw(st.integers(1, 4))):
        columns = draw(st.integers(1, 9))
        first = draw(st.integers(0, columns))
        known = range(first, draw(st.integers(first, columns)))
        found[row] = OffloadedPrefix(columns, known=known, on_host=draw(st.booleans()))
    return found


@given(of=prefixes(), recomputed=st.integers(0, 200), host=st.integers(0, 200))
def test_every_page_is_served_once(of, recomputed, host):
    shares = divide_prefixes(of, recomputed, host, PAGE)

    known = sum(len(front.known) for front in of.values()) * PAGE
    found = sum(len(share.recomputed) for share in shares.values()) * PAGE
    assert min(recomputed, known) - PAGE < found <= min(recomputed, known)
    assert sum(len(share.host) for share in shares.values()) * PAGE <= host
    for row, front in of.items():
        share = shares[row]
        served = [*share.recomputed, *share.host]
        served += [c for run in share.transferred(0, front.columns) for c in run]
        assert sorted(served) == list(range(front.columns))
        assert set(share.recomputed) <= set(front.known)
        assert front.on_host or not share.host


def test_runs_are_cut_at_pieces():
    share = Share(recomputed=range(2, 5), host=range(7, 9))

    assert list(share.transferred(0, 9)) == [range(2), range(5, 7)]
    assert list(share.transferred(3, 6)) == [range(5, 6)]
    assert list(share.transferred(2, 5)) == []
