"""A request under `when=pressure` in a memory that holds exactly its cap."""

import pytest

from quire.layout.eviction import PRESSURE, EvictionSpec
from support.scheduler_load import SchedulerLoad, Setting


@pytest.mark.parametrize("page_tokens", [1, 8])
@pytest.mark.parametrize("prompt", [2, 20])
def test_full_lane_evicts_and_continues_without_free_pages(page_tokens, prompt):
    """A cap of 8 in a memory of 8 slots: the peak of 8 is admitted, and 8 more tokens follow.

    With pages of 8 tokens the eviction frees 2 slots and no page, which suffices for the next.
    """
    pages = 8 // page_tokens
    setting = Setting(page_tokens=page_tokens, cap=6, pages=pages, max_num_seqs=1, chunk_tokens=2)
    load = SchedulerLoad(setting)
    request = load.request(prompt, 14)
    request.eviction.spec = EvictionSpec(cap=8, every=2, when=PRESSURE)

    assert load.submit(request)
    load.drain()

    assert not load.requests
    assert len(request.output_token_ids) == 14
    assert request.eviction.num_evictions > 0
