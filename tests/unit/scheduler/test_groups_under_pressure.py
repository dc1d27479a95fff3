"""Groups whose members evict tokens under pressure only: evictions free no shared pages."""

from dataclasses import replace

import pytest

from quire.errors import NeverFits
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE, EvictionSpec
from quire.scheduler.request import RequestGroup
from support.scheduler_load import SchedulerLoad, Setting

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
def test_group_with_shared_pages_fits_without_eviction_or_is_dissolved(when, together):
    """Two outputs of a prompt of 30 tokens, 24 of which fill the memory.

    An eviction from one member allocates pages before it frees any: as a group the members would
    hold all of the memory, and neither could proceed.
    """
    load = SchedulerLoad(THREE_PAGES)
    members = [load.request(30, 20) for _ in range(2)]
    for member in members:
        member.eviction.spec = EvictionSpec(cap=8, every=2, when=when)

    load.submit_group(members, atomic=False)

    assert (members[0].group is not None) == together
    load.drain()
    assert not load.requests


def test_beams_that_do_not_fit_are_rejected_with_advice():
    """Beams cannot run separately."""
    load = SchedulerLoad(THREE_PAGES)
    first, spare = (load.request(30, 20) for _ in range(2))
    first.group = spare.group = RequestGroup("r", atomic=True)
    first.group.members, first.group.spare = [first], [spare]
    first.eviction.spec = spare.eviction.spec = EvictionSpec(cap=8, every=2, when=PRESSURE)

    with pytest.raises(NeverFits, match=r"in 2 beams .*set when=prefill_and_decode"):
        load.scheduler.submit(first)
    assert not load.scheduler.has_work


@pytest.mark.parametrize("atomic", [False, True])
def test_members_that_share_pages_are_not_evicted_from(atomic):
    """An eviction from one would copy its shared pages: the copies could exceed the memory."""
    load = SchedulerLoad(Setting(page_tokens=4, cap=20, with_statistics=True, pages=40))
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
