"""The load client of `python -m benchmarks serve`."""

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serve.client import stream_all
from benchmarks.serve.connection import ChunkedBody, Connection, ServerError
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
        run = stream_all(url, [[1, 2], [3]], 3)

    assert [(one.text, one.output_tokens) for one in run.outcomes] == [("ab", 3)] * 2
    assert all(0 < one.ttft_s <= run.duration_s for one in run.outcomes)
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


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


class Transport:
    """A transport that sends nothing."""

    def write(self, data):
        pass


@pytest.mark.parametrize("cuts", [(-1,), (-2,), (-4,), (-4, -3, -2, -1), (-7, -5)])
def test_a_response_whose_last_chunk_arrives_in_segments_ends(cuts):
    async def main():
        connection = Connection("host", time.perf_counter)
        connection.connection_made(Transport())
        exchange = asyncio.ensure_future(connection.exchange("GET", "/", {}))
        await asyncio.sleep(0)  # it sends the request
        for start, end in pairwise((0, *(len(CHUNKED) + cut for cut in cuts), len(CHUNKED))):
            connection.data_received(CHUNKED[start:end])
        return await asyncio.wait_for(exchange, 5)

    assert asyncio.run(main()).body == b"abc"


def chunked(contents, extension=b""):
    chunks = (b"%X%b\r\n%b\r\n" % (len(one), extension, one) for one in contents if one)
    return b"".join(chunks) + b"0\r\n"


@given(
    contents=st.lists(st.binary(max_size=40), max_size=5),
    extension=st.sampled_from([b"", b"; name=value"]),
    trailer=st.sampled_from([b"", b"x-name: value\r\n"]),
    size=st.integers(1, 60),
)
def test_a_chunked_body_is_decoded_from_any_segments(contents, extension, trailer, size):
    body, data = ChunkedBody(), chunked(contents, extension) + trailer + b"\r\n"

    segments = [data[start : start + size] for start in range(0, len(data), size)]
    ends = [(body.add(segment), body.has_ended) for segment in segments]

    assert b"".join(content for content, _ in ends) == b"".join(contents)
    assert [ended for _, ended in ends] == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("data", [b"x\r\nabc", b"-1\r\n", b"\r\n", b"1\r\nabcd\r\n"])
def test_bytes_that_are_not_chunks_are_refused(data):
    with pytest.raises(ServerError, match="not valid HTTP"):
        ChunkedBody().add(data)


def test_a_connection_that_closes_within_a_chunked_body_fails():
    async def main():
        connection = Connection("host", time.perf_counter)
        connection.connection_made(Transport())
        exchange = asyncio.ensure_future(connection.exchange("GET", "/", {}))
        await asyncio.sleep(0)
        connection.data_received(CHUNKED[:-3])
        connection.connection_lost(None)
        await asyncio.wait_for(exchange, 5)

    with pytest.raises(ServerError, match="closed the connection"):
        asyncio.run(main())
