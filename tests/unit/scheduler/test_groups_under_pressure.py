"""Groups whose members lose tokens under pressure only: what they share cannot be relieved."""

from dataclasses import replace

import pytest

from quire.errors import NeverFits
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE, EvictionSpec
from quire.scheduler.request import RequestGroup
from unit.scheduler.scheduler_load import SchedulerLoad, Setting

THREE_PAGES = Setting(
    page_tokens=8,
    cap=6,
    host_pages=0,
    mixed=True,
    window=None,
    high_watermark=0.8,
    burst=50,
    preempt="auto",
    guaranteed=None,
    max_num_batched_tokens=1,
    max_num_seqs=3,
    pages=3,
    shares=False,
    chunk_tokens=2,
    admission="optimistic",
)


@pytest.mark.parametrize(("when", "together"), [(PRESSURE, False), (PREFILL_AND_DECODE, True)])
def test_members_that_share_fit_whole_without_losing_anything_or_run_apart(when, together):
    """Two answers behind 30 tokens, 24 of which fill the pool.

    Evicting from one of them takes pages of its own before it frees any: as a group they would
    hold the whole pool together, and neither could move.
    """
    load = SchedulerLoad(THREE_PAGES)
    members = [load.request(30, 20) for _ in range(2)]
    for member in members:
        member.eviction.spec = EvictionSpec(cap=8, every=2, when=when)

    load.submit_group(members, atomic=False)

    assert (members[0].group is not None) == together
    load.drain()
    assert not load.requests


def test_beams_that_would_not_fit_whole_are_refused_with_the_way_out():
    """Beams cannot run apart."""
    load = SchedulerLoad(THREE_PAGES)
    first, spare = (load.request(30, 20) for _ in range(2))
    first.group = spare.group = RequestGroup("r", atomic=True)
    first.group.members, first.group.spare = [first], [spare]
    first.eviction.spec = spare.eviction.spec = EvictionSpec(cap=8, every=2, when=PRESSURE)

    with pytest.raises(NeverFits, match=r"in 2 beams .*set when=prefill_and_decode"):
        load.scheduler.submit(first)
    assert not load.scheduler.has_work


@pytest.mark.parametrize("atomic", [False, True])
def test_members_that_share_pages_keep_their_tokens(atomic):
    """An eviction from one would copy what it shares: together they could outgrow the memory."""
    load = SchedulerLoad(Setting(page_tokens=4, cap=20, remembers=True, pages=40))
    members = [load.request(16, 6) for _ in range(2)]
    for member in members:
        member.eviction.spec = replace(member.eviction.spec, cap=16, every=4, when=PRESSURE)
    load.submit_group(list(members), atomic=atomic)
    while len(load.scheduler.running) < 2:
        load.step()
    capacities, running = load.scheduler.capacities, load.scheduler.running

    assert not capacities.evict_under_pressure(running)
    assert not capacities.reuse_slots(running)
    assert [member.eviction.num_evictions for member in members] == [0, 0]
    load.drain()
