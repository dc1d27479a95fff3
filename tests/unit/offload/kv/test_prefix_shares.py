"""Divided offloaded prefixes: whole pages, requested totals, and each page in one share."""

from hypothesis import given
from hypothesis import strategies as st

from quire.offload.kv.prefix_splits import OffloadedPrefix, Share, divide_prefixes

PAGE = 4


@st.composite
def offloaded_prefixes(draw):
    prefixes = {}
    for row in range(draw(st.integers(1, 4))):
        columns = draw(st.integers(1, 9))
        first = draw(st.integers(0, columns))
        known = range(first, draw(st.integers(first, columns)))
        prefixes[row] = OffloadedPrefix(columns, known=known, on_host=draw(st.booleans()))
    return prefixes


@given(prefixes=offloaded_prefixes(), recomputed=st.integers(0, 200), host=st.integers(0, 200))
def test_every_page_is_in_exactly_one_share(prefixes, recomputed, host):
    shares = divide_prefixes(prefixes, recomputed, host, PAGE)

    known = sum(len(prefix.known) for prefix in prefixes.values()) * PAGE
    found = sum(len(share.recomputed) for share in shares.values()) * PAGE
    assert min(recomputed, known) - PAGE < found <= min(recomputed, known)
    assert sum(len(share.host) for share in shares.values()) * PAGE <= host
    for row, prefix in prefixes.items():
        share = shares[row]
        columns = [*share.recomputed, *share.host]
        columns += [c for run in share.transferred(0, prefix.columns) for c in run]
        assert sorted(columns) == list(range(prefix.columns))
        assert set(share.recomputed) <= set(prefix.known)
        assert prefix.on_host or not share.host


def test_transferred_runs_are_clipped_to_the_range():
    share = Share(recomputed=range(2, 5), host=range(7, 9))

    assert list(share.transferred(0, 9)) == [range(2), range(5, 7)]
    assert list(share.transferred(3, 6)) == [range(5, 6)]
    assert list(share.transferred(2, 5)) == []
