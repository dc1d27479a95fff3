"""The load client of `python -m benchmarks serve`."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.streams import Response, stream
from benchmarks.serve import outcome_of, stream_all
from quire.errors import RequestError
from support.http_server import answering

EVENTS = [
    'data: {"choices":[{"text":"a"}]}\n\n',
    'data: {"choices":[{"text":"b"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":3}}\n\n',
]


def test_every_prompt_is_streamed_with_its_full_length():
    bodies = []

    def respond(path, body, headers):
        bodies.append((path, body))
        return 200, {}, EVENTS

    with answering(respond) as url:
        outcomes = stream_all(url, [[1, 2], [3]], 3)

    assert [(one.text, one.output_tokens) for one in outcomes] == [("ab", 3)] * 2
    assert all(one.start_s < one.first_s <= one.end_s for one in outcomes)
    assert sorted(body["prompt"] for _, body in bodies) == [[1, 2], [3]]
    assert {path for path, _ in bodies} == {"/v1/completions"}
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for _, body in bodies)


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (503, {"error": {"message": "queue full"}}, "queue full"),
        (200, ['data: {"error":{"message":"stopped"}}\n\n'], "stopped"),
        (200, ['data: {"choices":[{"text":"a"}]}\n\n'], "no usage"),
    ],
)
def test_a_failed_request_ends_the_run_with_its_reason(status, content, reason):
    with (
        answering(lambda path, body, headers: (status, {}, content)) as url,
        pytest.raises(RequestError, match=reason),
    ):
        stream_all(url, [[1]], 3)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_read_from_any_segments(sizes):
    chunks = "".join(f"{len(event):x}\r\n{event}\r\n" for event in EVENTS)
    data = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n".encode()
    segments = []
    while data:
        size = sizes[len(segments) % len(sizes)]
        segments.append((float(len(segments)), data[:size]))
        data = data[size:]

    outcome = outcome_of(Response(sent_s=0.0, segments=tuple(segments), has_left=False))

    assert (outcome.text, outcome.output_tokens) == ("ab", 3)


def test_a_client_leaves_after_its_number_of_events():
    with answering(lambda path, body, headers: (200, {}, EVENTS)) as url:
        response = asyncio.run(stream(url, {}, leaves_after=1))

    assert (response.status, response.has_left) == (200, True)
