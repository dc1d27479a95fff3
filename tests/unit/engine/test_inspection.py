"""Timelines, the ring of finished requests, and the encoding of the page map."""

import base64
import json

import numpy as np
import pytest

from quire.engine.inspection import request_log
from quire.engine.inspection.request_log import FIRST_EVENTS, LAST_EVENTS, RequestLog
from quire.engine.inspection.totals import PageOwners
from quire.kv.page_map import EVICTED, FIRST_ROW, ClassFacts, PageFacts
from quire.layout.codec_names import codec_spec
from quire.layout.pages import kv_pages
from quire.sampling.outputs import OutputDelta, Usage
from quire.scheduler.events import EventLog, KVEvent
from support.requests import make_request


def usage():
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
    counts |= dict.fromkeys(("preemptions", "evicted_tokens", "kv_peak_bytes"), 0)
    return Usage(**counts, first_token_s=0.0, total_s=0.0)


def last_delta(request_id, reason="stop", index=0):
    options = {"index": index, "token_ids": (), "finish_reason": reason}
    return OutputDelta(request_id=request_id, **options, usage=usage())


def test_timeline_keeps_the_first_and_the_last_events():
    timeline = request_log.RequestTimeline()
    total = FIRST_EVENTS + LAST_EVENTS + 10
    for number in range(total):
        timeline.add(KVEvent("chunk", 0.0, "r", "t", {}, number))

    numbers = [event.number for event in timeline.events]
    assert timeline.num_events == total
    assert numbers[:FIRST_EVENTS] == list(range(FIRST_EVENTS))
    assert numbers[FIRST_EVENTS:] == list(range(total - LAST_EVENTS, total))


def test_events_are_recorded_until_the_last_delta():
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


def test_sequences_of_a_request_finish_with_their_own_reasons():
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


def test_number_of_finished_requests_is_bounded():
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


def test_map_with_fewer_cells_shows_every_nth_page_and_exact_totals():
    body = owners_of([0, 2, 2, 3, 3, 3, 0, 1]).encode(3)
    assert body["pages_per_cell"] == 3
    assert decoded(body)[0] == [0, 3, 0]
    assert [one["pages"] for one in body["owners"]] == [2, 1, 2, 3]
    assert [one["bytes"] // PLAIN.page_bytes for one in body["owners"]] == [2, 1, 2, 3]
    assert "runs" not in owners_of([0, 2]).encode(with_map=False)


@pytest.mark.parametrize(
    ("page_class", "expected"),
    [(PLAIN, {"exact": 2, "evicted": 1, "quantized": 0}), (CODED, {"quantized": 2, "evicted": 1})],
)
def test_states_add_up_to_the_pages_in_use(page_class, expected):
    body = owners_of([0, 2, 2, 3], [0, 0, EVICTED, 0], page_class).encode()
    pages = {name: size // page_class.page_bytes for name, size in body["states"].items()}
    assert pages | expected == pages
    assert sum(pages[name] for name in ("exact", "evicted", "quantized")) == 3
