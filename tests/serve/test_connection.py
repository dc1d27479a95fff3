"""Connections over real sockets: those that a client leaves half open are closed."""

import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import uvicorn

from quire.models.tokenizer import encode_prompt
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.connection import TimedConnection, bind, listen
from quire.serve.tenant_keys import TenantKeys

TIMEOUT_S = 0.5
PATIENCE_S = 20.0
KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",)})
KEY = b"Authorization: Bearer sk-a-2f0c77d1\r\n"
HEADERS = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Once"}'
WHOLE = HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def address(llm):
    app = create_app(llm, ServerConfig(max_body="1MiB"), tenant_keys=KEYS)
    protocol = partial(TimedConnection, header_timeout_s=TIMEOUT_S)
    config = uvicorn.Config(app, http=protocol, ws="none", log_level="warning")
    with bind("127.0.0.1", 0) as bound:
        listen(bound)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield bound.getsockname()
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextmanager
def connected(address):
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        yield client


def answer_of(client):
    """A whole response of /tokenize, whose JSON ends with a brace."""
    received = b""
    while not received.endswith(b"}"):
        received += client.recv(65536)
    return received


def sending_fails_after_s(client, part, pause_s):
    """Seconds until a client that sends on and on finds the connection closed."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < PATIENCE_S:
        try:
            client.sendall(part)
        except OSError:
            break
        time.sleep(pause_s)
    return time.monotonic() - start_s


def closed_after_s(client):
    """Seconds until the server closes the connection, and what it sent before."""
    start_s, received = time.monotonic(), b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionError:
        pass
    return time.monotonic() - start_s, received


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST /tok", HEADERS, HEADERS + KEY + b"Content-Length: 100\r\n\r\n" + b'{"prompt'],
    ids=["nothing", "a line", "headers", "a body"],
)
def test_a_connection_that_stays_half_open_is_closed(address, begun):
    with connected(address) as client:
        client.sendall(begun)

        seconds, received = closed_after_s(client)

    assert received == b""
    assert TIMEOUT_S * 0.8 < seconds < TIMEOUT_S * 10


def test_headers_that_trickle_in_are_cut_off(address):
    with connected(address) as client:
        client.sendall(HEADERS)

        assert sending_fails_after_s(client, b"X: y\r\n", TIMEOUT_S / 5) < TIMEOUT_S * 10


def test_a_body_may_take_longer_than_headers_while_it_moves(address):
    with connected(address) as client:
        client.sendall(HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for byte in BODY:
            client.sendall(bytes([byte]))
            time.sleep(TIMEOUT_S * 2 / len(BODY))
        answer = answer_of(client)

    assert answer.startswith(b"HTTP/1.1 200")


def test_a_connection_that_is_used_again_has_the_time_anew(address):
    with connected(address) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            assert answer_of(client).startswith(b"HTTP/1.1 200")
            time.sleep(TIMEOUT_S * 0.8)
        client.sendall(HEADERS)
        seconds, received = closed_after_s(client)

    assert received == b""
    assert seconds < TIMEOUT_S * 10


def test_an_answer_may_take_longer_than_headers(address, monkeypatch):
    def slow(tokenizer, text, **options):
        time.sleep(TIMEOUT_S * 2)
        return encode_prompt(tokenizer, text, **options)

    monkeypatch.setattr("quire.serve.text.encode_prompt", slow)
    with connected(address) as client:
        client.sendall(WHOLE)

        assert answer_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [b"", KEY], ids=["no key", "a key"])
def test_a_chunked_body_that_never_ends_is_refused_and_cut_off(address, key):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connected(address) as client:
        client.sendall(HEADERS + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)

        assert sending_fails_after_s(client, chunk, 0.01) < TIMEOUT_S * 12


@pytest.mark.parametrize(("key", "status"), [(b"", b"401"), (KEY, b"413")])
def test_a_large_body_is_answered_without_being_read(address, key, status):
    with connected(address) as client:
        client.sendall(HEADERS + key + b"Content-Length: 10000000\r\n\r\n")

        assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
