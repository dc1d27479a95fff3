"""The snapshot of an engine's KV: every byte has one owner, on every axis the bytes add up."""

import json

import numpy as np
import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.ledger import Ledger
from quire.engine.shared_pool import SharedPool
from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.offload.swap.host_pool import HostPool
from quire.scheduler.request_parts import RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.requests import make_request

FLOAT = codec_spec("float32")
PAGE = PageClass(key=FLOAT, value=FLOAT, heads=1, head_dim=8, tokens=4)  # 256 B
ODD = PageClass(key=FLOAT, value=FLOAT, heads=1, head_dim=8, tokens=5, positions=True)  # 384 B
LAYOUT = CacheLayout(
    (
        LaneGroup(name="full", page_class=PAGE, layers=(0, 1)),
        LaneGroup(name="loose", page_class=ODD, layers=(2,), ordered=False),
    )
)


class Books:
    """A memory, requests on its rows, and their ledger."""

    def __init__(self, host_bytes=0):
        self.memory = KVMemory(LAYOUT, 48 * 1024, max_rows=8)
        self.host = HostPool(host_bytes) if host_bytes else None
        self.requests = []
        self.ledger = Ledger(self.memory, lambda: self.requests, self.host)

    def request(self, tokens, *, tenant="default", row=None):
        request = make_request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=[1] * max(1, tokens),
            params=SamplingParams(),
            arrival=len(self.requests),
            tenant=tenant,
        )
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
            request.memory.row, request.progress.state, request.memory.swapped = (
                -1,
                RequestState.WAITING,
                swapped,
            )
        return swapped

    def evict(self, request, token):
        slots = int(self.memory.tables["loose"].num_slots[request.memory.row, 0])
        keep = np.arange(slots)[None] != token
        commit_compaction(
            self.memory, plan_compaction(self.memory, "loose", request.memory.row, keep)
        )

    def snapshot(self):
        self.ledger.check()
        found = self.ledger.snapshot()
        prove_sums(found)
        return found


def prove_sums(found):
    """Every axis adds up to the pages in use, and all owners to the arena."""
    axes = found["axes"]
    device_bytes = axes["residency"]["device"]
    assert sum(axes["owner"].values()) == found["total_bytes"]
    assert found["used_bytes"] + found["free_bytes"] == found["total_bytes"]
    assert device_bytes == found["used_bytes"] - axes["owner"]["slab_borders"]
    assert axes["residency"]["host"] == found["host"]["used_bytes"]
    for axis in ("codec", "exactness", "sharing", "references"):
        assert sum(axes[axis].values()) == device_bytes
    held = [row["kv_bytes"] for row in found["requests"]]
    cached = [extent["bytes"] for extent in found["prefix_cache"]]
    assert sum(held) == axes["owner"]["requests"]
    assert sum(cached) == axes["owner"]["prefix_cache"]
    for name in ("kv_bytes", "host_bytes"):
        assert sum(row[name] for row in found["requests"]) == sum(
            tenant[name] for tenant in found["tenants"]
        )
    for row in found["requests"]:
        assert row["kv_bytes"] == sum(extent["bytes"] for extent in row["extents"])
    assert json.loads(json.dumps(found)) == found


def test_an_idle_engine_has_all_bytes_free():
    found = Books().snapshot()

    assert found["axes"]["owner"] == {
        "requests": 0,
        "prefix_cache": 0,
        "free": found["total_bytes"],
        "arriving": 0,
        "slab_borders": 0,
    }
    assert found["requests"] == found["tenants"] == found["prefix_cache"] == []


def test_each_tenant_has_what_its_requests_have():
    books = Books()
    books.request(4, tenant="red")
    books.request(8, tenant="blue")
    books.request(4, tenant="red")
    books.request(0, tenant="green")

    found = books.snapshot()

    one, two = 2 * 256 + 384, 4 * 256 + 2 * 384
    assert found["tenants"] == [
        {"tenant": "red", "requests": 2, "kv_bytes": 2 * one, "host_bytes": 0},
        {"tenant": "blue", "requests": 1, "kv_bytes": two, "host_bytes": 0},
        {"tenant": "green", "requests": 1, "kv_bytes": 0, "host_bytes": 0},
    ]
    assert [row["state"] for row in found["requests"]] == ["running"] * 3 + ["waiting"]


def test_forks_have_equal_parts_of_what_they_share_and_all_of_their_own():
    books = Books()
    parent = books.request(8)
    child = books.request(8, row=fork(books.memory, parent.memory.row))
    books.memory.grow(np.array([child.memory.row]), np.array([1], dtype=np.int32))

    first, second = books.snapshot()["requests"]

    # the child copied its last loose page (5 to 9) and added a page to each full lane
    assert first["alone_bytes"] == 384
    assert second["alone_bytes"] == 384 + 2 * 256
    assert first["kv_bytes"] - 384 == second["kv_bytes"] - 384 - 2 * 256 == (4 * 256 + 384) // 2


def test_a_request_that_has_lost_tokens_is_approximate():
    books = Books()
    whole, pruned = books.request(10), books.request(10)
    books.evict(pruned, 3)

    found = books.snapshot()

    exact, approximate = found["requests"]
    assert (exact["exact"], approximate["exact"]) == (True, False)
    assert found["axes"]["exactness"] == {
        "exact": exact["kv_bytes"],
        "approximate": approximate["kv_bytes"],
    }
    assert whole.eviction.exact


def test_what_was_swapped_out_is_on_the_host_until_it_returns():
    books = Books(host_bytes=16 * 1024)
    gone, stays = books.request(8, tenant="red"), books.request(4)
    kv_bytes = books.memory.row_bytes(gone.memory.row)
    swapped = books.swap_out(gone)

    found = books.snapshot()

    assert [(r["kv_bytes"], r["host_bytes"]) for r in found["requests"]] == [
        (0, kv_bytes),
        (2 * 256 + 384, 0),
    ]
    assert found["axes"]["residency"]["host"] == kv_bytes
    assert found["host"]["free_bytes"] == 16 * 1024 - kv_bytes
    [gone.memory.row] = swap_in(books.memory, swapped)
    gone.memory.swapped = None
    assert books.snapshot()["axes"]["residency"]["host"] == 0
    assert stays.memory.row != gone.memory.row


def test_sequences_swapped_together_split_what_is_stored_once():
    books = Books(host_bytes=16 * 1024)
    parent = books.request(8)
    children = [books.request(8, row=fork(books.memory, parent.memory.row)) for _ in range(2)]
    kv_bytes = books.memory.row_bytes(parent.memory.row)
    books.swap_out(parent, *children)

    parts = [row["host_bytes"] for row in books.snapshot()["requests"]]

    assert sum(parts) == kv_bytes
    assert max(parts) - min(parts) <= len(LAYOUT.page_classes)


def test_a_host_pool_that_no_request_knows_of_is_a_leak():
    books = Books(host_bytes=16 * 1024)
    request = books.request(8)
    books.swap_out(request)
    books.requests.clear()

    with pytest.raises(InvariantError, match="of the swap space are used"):
        books.ledger.check()


def test_a_row_without_a_request_is_shown_as_nobodys():
    books = Books()
    books.request(4)
    books.requests.clear()

    [row] = books.snapshot()["requests"]

    assert (row["request_id"], row["tenant"]) == ("", "")
    assert row["kv_bytes"] == 2 * 256 + 384


def test_a_running_engine_shows_its_requests():
    model = engines.load("llama")
    engine = engines.engine_for(model, room=2, longest=40, page_tokens=4)
    engine.submit(GenerationRequest([3] * 20, engines.greedy(8), request_id="a"))
    engine.submit(GenerationRequest([4] * 9, engines.greedy(8), request_id="b"))
    engine.step()

    found, stats = engine.ledger(), engine.stats()

    prove_sums(found)
    assert [row["request_id"] for row in found["requests"]] == ["a", "b"]
    assert all(row["exact"] for row in found["requests"])
    assert found["axes"]["residency"]["device"] > 0
    assert [(t.tenant, t.num_requests) for t in stats.tenants] == [("default", 2)]
    assert stats.tenants[0].kv_bytes == sum(r.kv_bytes for r in stats.requests)
    while engine.has_work:
        engine.step()
    assert engine.ledger()["requests"] == []
    assert engine.stats().tenants == ()
    assert (engine.stats().cached_bytes, engine.stats().host_bytes) == (
        engine.ledger()["axes"]["owner"]["prefix_cache"],
        0,
    )


def test_engines_that_share_an_arena_have_a_ledger_each():
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
        prove_sums(found)
        assert found["axes"]["owner"]["requests"] > 0
    for engine in (small, large):
        while engine.has_work:
            engine.step()
