"""Timelines and the ring of finished requests."""

from quire.engine.inspection.request_log import (
    FIRST_EVENTS,
    KEPT_FINISHED,
    LAST_EVENTS,
    RequestLog,
    RequestTimeline,
)
from quire.sampling.outputs import OutputDelta, Usage
from quire.scheduler.events import EventLog, KVEvent
from support.requests import make_request


def usage():
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
    counts |= dict.fromkeys(("preemptions", "evicted_tokens", "kv_peak_bytes"), 0)
    return Usage(**counts, first_token_s=0.0, total_s=0.0)


def last_delta(request_id, reason="stop", index=0):
    return OutputDelta(
        request_id=request_id, index=index, token_ids=(), finish_reason=reason, usage=usage()
    )


def test_timeline_keeps_the_first_and_the_last_events():
    timeline = RequestTimeline()
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
    for number in range(KEPT_FINISHED + 3):
        log.open(str(number), [make_request(str(number))])
        log.note([last_delta(str(number))])

    assert len(log.finished) == KEPT_FINISHED
    assert log.finished[-1].request_id == str(KEPT_FINISHED + 2)
