"""The KV ledger of an engine: every byte has one owner, and the bytes of every axis add up."""

import numpy as np
import pytest

from quire import GenerationRequest, KVConfig, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.ledger import Ledger
from quire.engine.shared_pool import SharedPool
from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages
from quire.offload.swap.host_pool import HostPool
from quire.scheduler.request import RequestState
from support import engines
from support.ledger_sums import check_sums
from support.requests import make_request

FLOAT = codec_spec("float32")
PAGE = kv_pages(key=FLOAT, value=FLOAT, heads=1, head_dim=8, tokens=4)  # 256 B
ODD = kv_pages(key=FLOAT, value=FLOAT, heads=1, head_dim=8, tokens=5, positions=True)  # 384 B
LAYOUT = CacheLayout(
    (
        LaneGroup(name="full", page_class=PAGE, layers=(0, 1)),
        LaneGroup(name="loose", page_class=ODD, layers=(2,), ordered=False),
    )
)


class LedgerOfRows:
    """A KV memory, requests on its rows, and their ledger."""

    def __init__(self, host_bytes=0):
        self.memory = KVMemory(LAYOUT, 48 * 1024, max_rows=8)
        self.host = HostPool(host_bytes) if host_bytes else None
        self.requests = []
        self.ledger = Ledger(self.memory, lambda: self.requests, self.host)

    def request(self, tokens, *, tenant="default", row=None):
        number, prompt = len(self.requests), [1] * max(1, tokens)
        request = make_request(f"r{number}", prompt, arrival=number, tenant=tenant)
        self.requests.append(request)
        if tokens:
            request.progress.state = RequestState.RUNNING
            request.memory.row = self.memory.start() if row is None else row
            grown = 0 if row is not None else tokens
            self.memory.grow(np.array([request.memory.row]), np.array([grown], dtype=np.int32))
        return request

    def swap_out(self, *requests):
        swapped = swap_out(self.memory, [r.memory.row for r in requests], self.host)
        for request in requests:
            request.memory.row, request.memory.swapped = -1, swapped
            request.progress.state = RequestState.WAITING
        return swapped

    def evict(self, request, token):
        row = request.memory.row
        keep = np.arange(int(self.memory.tables["loose"].num_slots[row, 0]))[None] != token
        commit_compaction(self.memory, plan_compaction(self.memory, "loose", row, keep))

    def snapshot(self):
        self.ledger.check()
        found = self.ledger.snapshot()
        check_sums(found)
        return found


def test_all_bytes_are_free_without_requests():
    found = LedgerOfRows().snapshot()
    others = dict.fromkeys(("requests", "prefix_cache", "in_flight_loads", "slab_borders"), 0)
    assert found["axes"]["owner"] == others | {"free": found["total_bytes"]}
    assert found["requests"] == found["tenants"] == found["prefix_cache"] == []


def test_bytes_of_a_tenant_are_the_sum_over_its_requests():
    rows = LedgerOfRows()
    for tokens, tenant in ((4, "red"), (8, "blue"), (4, "red"), (0, "green")):
        rows.request(tokens, tenant=tenant)

    found = rows.snapshot()

    one, two = 2 * 256 + 384, 4 * 256 + 2 * 384
    assert found["tenants"] == [
        {"tenant": "red", "requests": 2, "kv_bytes": 2 * one, "host_bytes": 0},
        {"tenant": "blue", "requests": 1, "kv_bytes": two, "host_bytes": 0},
        {"tenant": "green", "requests": 1, "kv_bytes": 0, "host_bytes": 0},
    ]
    assert [row["state"] for row in found["requests"]] == ["running"] * 3 + ["waiting"]


def test_forks_split_shared_pages_equally_and_own_their_private_pages():
    rows = LedgerOfRows()
    parent = rows.request(8)
    child = rows.request(8, row=fork(rows.memory, parent.memory.row))
    rows.memory.grow(np.array([child.memory.row]), np.array([1], dtype=np.int32))

    first, second = rows.snapshot()["requests"]

    # the child copied its last loose page (5 to 9) and added a page to each full lane
    assert first["exclusive_bytes"] == 384
    assert second["exclusive_bytes"] == 384 + 2 * 256
    assert first["kv_bytes"] - 384 == second["kv_bytes"] - 384 - 2 * 256 == (4 * 256 + 384) // 2


def test_request_with_evicted_tokens_is_approximate():
    rows = LedgerOfRows()
    whole, pruned = rows.request(10), rows.request(20)
    rows.evict(pruned, 3)

    found = rows.snapshot()

    exact, approximate = found["requests"]
    assert (exact["exact"], approximate["exact"]) == (True, False)
    by_exactness = {"exact": exact["kv_bytes"], "approximate": approximate["kv_bytes"]}
    assert found["axes"]["exactness"] == by_exactness
    assert whole.eviction.exact


def test_swapped_kv_is_counted_on_the_host_until_it_is_swapped_in():
    rows = LedgerOfRows(host_bytes=16 * 1024)
    swapped_request, running_request = (rows.request(8, tenant="red"), rows.request(4))
    kv_bytes = rows.memory.row_bytes(swapped_request.memory.row)
    swapped = rows.swap_out(swapped_request)

    found = rows.snapshot()

    by_request = [(r["kv_bytes"], r["host_bytes"]) for r in found["requests"]]
    assert by_request == [(0, kv_bytes), (2 * 256 + 384, 0)]
    assert found["axes"]["location"]["host"] == kv_bytes
    assert found["host"]["free_bytes"] == 16 * 1024 - kv_bytes
    [swapped_request.memory.row] = swap_in(rows.memory, swapped)
    swapped_request.memory.swapped = None
    assert rows.snapshot()["axes"]["location"]["host"] == 0
    assert running_request.memory.row != swapped_request.memory.row


def test_sequences_swapped_together_split_the_bytes_stored_once():
    rows = LedgerOfRows(host_bytes=16 * 1024)
    parent = rows.request(8)
    children = [rows.request(8, row=fork(rows.memory, parent.memory.row)) for _ in range(2)]
    kv_bytes = rows.memory.row_bytes(parent.memory.row)
    rows.swap_out(parent, *children)

    shares = [row["host_bytes"] for row in rows.snapshot()["requests"]]

    assert sum(shares) == kv_bytes
    assert max(shares) - min(shares) <= len(LAYOUT.page_classes)


def test_row_without_a_request_is_listed_and_swapped_kv_without_one_is_a_leak():
    rows = LedgerOfRows(host_bytes=16 * 1024)
    rows.request(4)
    rows.requests.clear()
    [row] = rows.snapshot()["requests"]
    assert (row["request_id"], row["tenant"]) == ("", "")
    assert row["kv_bytes"] == 2 * 256 + 384

    rows.swap_out(rows.request(8))
    rows.requests.clear()
    with pytest.raises(InvariantError, match="of the swap space are used"):
        rows.ledger.check()


def test_ledger_and_stats_of_a_running_engine_agree():
    model = engines.load("llama")
    engine = engines.engine_for(model, room=2, longest=40, page_tokens=4)
    engine.submit(GenerationRequest([3] * 20, engines.greedy(8), request_id="a"))
    engine.submit(GenerationRequest([4] * 9, engines.greedy(8), request_id="b"))
    engine.step()

    found, stats = engine.ledger(), engine.stats()

    check_sums(found)
    assert [row["request_id"] for row in found["requests"]] == ["a", "b"]
    assert all(row["exact"] for row in found["requests"])
    assert found["axes"]["location"]["device"] > 0
    assert [(t.tenant, t.num_requests) for t in stats.tenants] == [("default", 2)]
    assert stats.tenants[0].kv_bytes == sum(r.kv_bytes for r in stats.requests)
    while engine.has_work:
        engine.step()
    assert engine.ledger()["requests"] == []
    assert engine.stats().tenants == ()
    assert engine.stats().cached_bytes == engine.ledger()["axes"]["owner"]["prefix_cache"]
    assert engine.stats().host_bytes == 0


def test_engines_that_share_an_arena_have_separate_ledgers():
    pool = SharedPool(96 * 1024, slab_bytes=4 * 1024)
    kv, schedule = KVConfig(page_tokens=4), ScheduleConfig(max_num_seqs=4)
    small, large = (
        Engine(engines.load(name), kv, schedule, pool=pool.join(name, guaranteed=32 * 1024))
        for name in ("llama_mqa", "gpt2")
    )
    for engine in (small, large):
        engine.submit(GenerationRequest([3] * 9, engines.greedy(4)))
        engine.step()

    for engine in (small, large):
        found = engine.ledger()
        check_sums(found)
        assert found["axes"]["owner"]["requests"] > 0
    for engine in (small, large):
        while engine.has_work:
            engine.step()
