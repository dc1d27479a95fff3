"""The KV ledger: every byte has one owner; timelines, finished requests and the page map."""

import base64
import json

import numpy as np
import pytest

from quire import GenerationRequest, KVConfig, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.inspection import request_log
from quire.engine.inspection.request_log import FIRST_EVENTS, LAST_EVENTS, RequestLog
from quire.engine.inspection.totals import PageOwners
from quire.engine.ledger import Ledger
from quire.engine.shared_pool import SharedPool
from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.page_map import EVICTED, FIRST_ROW, ClassFacts, PageFacts
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages
from quire.offload.swap.host_pool import HostPool
from quire.sampling.outputs import OutputDelta, Usage
from quire.scheduler.events import EventLog, KVEvent
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


def test_bytes_are_free_or_the_sum_over_requests_of_a_tenant():
    found = LedgerOfRows().snapshot()
    others = dict.fromkeys(("requests", "prefix_cache", "in_flight_loads", "slab_borders"), 0)
    assert found["axes"]["owner"] == others | {"free": found["total_bytes"]}
    assert found["requests"] == found["tenants"] == found["prefix_cache"] == []

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


def test_forks_share_bytes_and_evicting_requests_are_approximate():
    rows = LedgerOfRows()
    parent = rows.request(8)
    child = rows.request(8, row=fork(rows.memory, parent.memory.row))
    rows.memory.grow(np.array([child.memory.row]), np.array([1], dtype=np.int32))

    first, second = rows.snapshot()["requests"]

    # the child copied its last loose page (5 to 9) and added a page to each full lane
    assert first["exclusive_bytes"] == 384
    assert second["exclusive_bytes"] == 384 + 2 * 256
    assert first["kv_bytes"] - 384 == second["kv_bytes"] - 384 - 2 * 256 == (4 * 256 + 384) // 2

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


def test_swapped_sequences_split_bytes_and_lost_ones_are_leaks():
    rows = LedgerOfRows(host_bytes=16 * 1024)
    parent = rows.request(8)
    children = [rows.request(8, row=fork(rows.memory, parent.memory.row)) for _ in range(2)]
    kv_bytes = rows.memory.row_bytes(parent.memory.row)
    rows.swap_out(parent, *children)

    shares = [row["host_bytes"] for row in rows.snapshot()["requests"]]

    assert sum(shares) == kv_bytes
    assert max(shares) - min(shares) <= len(LAYOUT.page_classes)

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


# ---- inspection ----------------------------------------------------------------------------------


def usage():
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
    counts |= dict.fromkeys(("preemptions", "evicted_tokens", "kv_peak_bytes"), 0)
    return Usage(**counts, first_token_s=0.0, total_s=0.0)


def last_delta(request_id, reason="stop", index=0):
    options = {"index": index, "token_ids": (), "finish_reason": reason}
    return OutputDelta(request_id=request_id, **options, usage=usage())


def test_the_first_and_the_last_events_are_recorded_until_the_last_delta():
    events = EventLog(lambda: 7.0)
    log, request = RequestLog(events, lambda: 9.0), make_request("r", [1, 2, 3])
    log.open("r", [request])
    events.emit("admitted", request, tokens=3)
    events.emit("admitted", make_request("other"))

    log.note([OutputDelta(request_id="r", token_ids=(5,)), OutputDelta(request_id="unknown")])
    assert [e.kind for e in log.timeline("r").events] == ["admitted"]
    assert log.finished == []

    log.note([last_delta("r", "length")])
    events.emit("freed", request)
    [one] = log.finished
    assert log.timeline("r") is None
    assert (one.request_id, one.finish_reason, one.prompt_tokens) == ("r", "length", 3)
    assert one.finish_s == 9.0
    assert [e.kind for e in one.timeline.events] == ["admitted"]

    timeline = request_log.RequestTimeline()
    total = FIRST_EVENTS + LAST_EVENTS + 10
    for number in range(total):
        timeline.add(KVEvent("chunk", 0.0, "r", "t", {}, number))

    numbers = [event.number for event in timeline.events]
    assert timeline.num_events == total
    assert numbers[:FIRST_EVENTS] == list(range(FIRST_EVENTS))
    assert numbers[FIRST_EVENTS:] == list(range(total - LAST_EVENTS, total))


def test_finished_requests_have_their_reasons_and_are_bounded():
    events = EventLog()
    log = RequestLog(events, events.now_s)
    sequences = [make_request("r"), make_request("r#1"), make_request("r#2")]
    log.open("r", sequences)
    for sequence in sequences[:2]:
        events.emit("admitted", sequence)

    first = OutputDelta(request_id="r", index=1, token_ids=(), finish_reason="length")
    log.note([first, last_delta("r", "stop", 0)])

    # the third was never started: a spare beam
    found = [(one.request_id, one.group, one.finish_reason) for one in log.finished]
    assert found == [("r", "r", "stop"), ("r#1", "r", "length")]

    events = EventLog()
    log = RequestLog(events, events.now_s)
    for number in range(request_log.KEPT_FINISHED + 3):
        log.open(str(number), [make_request(str(number))])
        log.note([last_delta(str(number))])
    assert len(log.finished) == request_log.KEPT_FINISHED
    assert log.finished[-1].request_id == str(request_log.KEPT_FINISHED + 2)


PLAIN, CODED = (
    kv_pages(key=codec_spec(codec), value=codec_spec(codec), head_dim=8, heads=1, tokens=4)
    for codec in ("float32", "int8")
)


def owners_of(owner, state=None, page_class=PLAIN, num_rows=2):
    owner = np.asarray(owner, dtype=np.uint16)
    state = np.zeros(len(owner), np.uint8) if state is None else np.asarray(state, np.uint8)
    pages = np.arange(len(owner), dtype=np.int32)
    facts = PageFacts((ClassFacts(page_class, "codec", pages, owner, state),))
    rows = [{"kind": "request", "request_id": f"r{i}", "tenant": "t"} for i in range(num_rows)]
    return PageOwners(facts, rows, [["full"]], {})


def decoded(body):
    runs = {name: base64.b64decode(text) for name, text in body["runs"].items()}
    count = np.frombuffer(runs["count"], "<u2")
    return (
        np.repeat(np.frombuffer(runs["owner"], "<u2"), count).tolist(),
        np.repeat(np.frombuffer(runs["state"], np.uint8), count).tolist(),
    )


@pytest.mark.parametrize(
    "owner", [[], [0], [0, 0, 2, 2, 3, 0], [2, 3] * 50, [0] * 70_000 + [2] * 65_536]
)
def test_runs_decode_to_the_cells(owner):
    state = [o % 3 for o in owner]
    assert decoded(owners_of(owner, state).encode(1 << 20)) == (owner, state)
    many = np.arange(100_000) % 250 + FIRST_ROW  # without equal neighbours
    body = owners_of(many, num_rows=250).encode()
    assert decoded(body)[0] == many.tolist()
    assert len(json.dumps(body)) < 1_000_000


def test_map_with_fewer_cells_shows_every_nth_page_exact_totals_and_states():
    body = owners_of([0, 2, 2, 3, 3, 3, 0, 1]).encode(3)
    assert body["pages_per_cell"] == 3
    assert decoded(body)[0] == [0, 3, 0]
    assert [one["pages"] for one in body["owners"]] == [2, 1, 2, 3]
    assert [one["bytes"] // PLAIN.page_bytes for one in body["owners"]] == [2, 1, 2, 3]
    assert "runs" not in owners_of([0, 2]).encode(with_map=False)
    for page_class, expected in (
        (PLAIN, {"exact": 2, "evicted": 1, "quantized": 0}),
        (CODED, {"quantized": 2, "evicted": 1}),
    ):
        body = owners_of([0, 2, 2, 3], [0, 0, EVICTED, 0], page_class).encode()
        pages = {name: size // page_class.page_bytes for name, size in body["states"].items()}
        assert pages | expected == pages
        assert sum(pages[name] for name in ("exact", "evicted", "quantized")) == 3
