"""A request that holds exactly its cap under `when=pressure` in a memory that holds no more."""

import pytest

from quire.layout.eviction import PRESSURE, EvictionSpec
from unit.scheduler.scheduler_load import SchedulerLoad, Setting


@pytest.mark.parametrize("page_tokens", [1, 8])
@pytest.mark.parametrize("prompt", [2, 20])
def test_a_full_lane_goes_on_where_no_page_is_left(page_tokens, prompt):
    """A cap of 8 in a memory of 8: admitted, as its peak is 8, and 8 more come than that.

    With pages of 8 tokens the eviction frees 2 slots and no page, which is enough for the next.
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
