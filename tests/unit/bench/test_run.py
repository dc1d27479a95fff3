"""`quire bench serve` against a server whose responses are known."""

import asyncio
import json
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.bench.connection import ChunkedBody, Connection, ServerError
from quire.cli.main import app
from support.http_server import answering

MODELS = {"data": [{"id": "some-model", "root": "quire-tiny"}]}
COMMON = ("--vocab-size", "100", "--input-len", "5", "--output-len", "3", "--num-prompts", "6")


def chunk(text):
    return f'data: {{"choices":[{{"text":"{text}"}}]}}\n\n'


STREAM = [chunk("a"), chunk("b"), 'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n']


class Server:
    """Responds to requests, and records their bodies and the most that were open at once."""

    def __init__(self, content=STREAM, status=200):
        self.content, self.status = content, status
        self.bodies, self.headers = [], []
        self.open = self.most_open = 0
        self._lock = threading.Lock()

    def __call__(self, path, body, headers):
        if body is None:
            return 200, {}, MODELS
        with self._lock:
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            self.bodies.append((path, body))
            self.headers.append(dict(headers))
        threading.Event().wait(0.02)
        with self._lock:
            self.open -= 1
        return self.status, {}, self.content


def bench(url, *arguments, code=0):
    line = ["bench", "serve", "--base-url", url, *COMMON, *arguments, "--json"]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1]) if result.stdout else result.stderr


def test_all_requests_are_sent_with_the_options_of_the_command():
    server = Server()
    with answering(server) as url:
        found = bench(
            *(url, "--ignore-eos", "--top-p", "0.5", "--extra-body", '{"n": 1}'),
            *("--api-key", "secret", "--header", "X-A=b", "--goodput", "ttft:60000"),
        )

    claims = found["claims"]
    assert (claims["completed"], claims["failed"], claims["total_output_tokens"]) == (6, 0, 18)
    assert claims["request_goodput"] == claims["request_throughput"]
    assert "secret" not in json.dumps(found)
    path, body = server.bodies[0]
    assert path == "/v1/completions"
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "some-model",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 0.5,
        "n": 1,
    }
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.headers[0]["X-A"] == "b"


def test_chats_are_sent_as_messages_with_a_text_of_the_servers_tokenizer():
    server = Server(['data: {"choices":[{"delta":{"content":"a"}}]}\n\n'])
    line = ["bench", "serve", "--num-prompts", "2", "--input-len", "5", "--json"]
    with answering(server) as url:
        line += ["--base-url", url, "--endpoint", "/v1/chat/completions"]
        result = CliRunner().invoke(app, line, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert body["messages"][0]["role"] == "user"
    assert isinstance(body["messages"][0]["content"], str)
    assert body["max_completion_tokens"] == 64


def test_no_more_requests_are_open_than_the_limit():
    server = Server()
    with answering(server) as url:
        bench(url, "--max-concurrency", "2", "--num-warmups", "3")

    assert server.most_open == 2
    assert len(server.bodies) == 9


def test_the_limit_of_open_files_is_raised(monkeypatch):
    calls = []
    monkeypatch.setattr("quire.bench.run.raise_file_limit", lambda: calls.append(1))
    with answering(Server()) as url:
        bench(f"{url}/v1", "--backend", "vllm")

    assert calls == [1]


def test_failed_requests_are_counted_with_their_reason():
    server = Server({"error": {"message": "queue full"}}, status=503)
    with answering(server) as url:
        found = bench(url, code=1)

    assert (found["claims"]["completed"], found["claims"]["failed"]) == (0, 6)


def test_results_are_written_and_appended(tmp_path):
    arguments = ("--result-dir", str(tmp_path), "--result-filename", "r.json")
    with answering(Server()) as url:
        bench(url, "--save-detailed", "--metadata", "version=7", *arguments)
        bench(url, "--append-result", *arguments)

    first, second = (tmp_path / "r.json").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["generated_texts"] == ["ab"] * 6
    assert json.loads(first)["version"] == "7"
    assert "generated_texts" not in json.loads(second)


@pytest.mark.parametrize("arguments", [(), ("--port", "1")])
def test_a_missing_server_is_reported_in_one_line(arguments):
    with answering(Server()) as url:
        pass
    line = ["bench", "serve", "--vocab-size", "9", *(arguments or ("--base-url", url))]

    result = CliRunner().invoke(app, line)

    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr
    assert "--base-url" in result.stderr


def test_a_response_that_is_not_http_fails_alone():
    def respond(path, body, headers):
        return (200, {}, MODELS) if body is None else (200, {"x": "y"}, b"data: {]")

    with answering(respond) as url:
        found = bench(url, code=1)

    assert found["claims"]["failed"] == 6


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
