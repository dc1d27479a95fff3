"""Connections over real sockets: timeouts of incomplete requests."""

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


def response_of(client):
    """A complete response of /tokenize; its JSON ends with a brace."""
    received = b""
    while not received.endswith(b"}"):
        received += client.recv(65536)
    return received


def sending_fails_after_s(client, part, pause_s):
    """Seconds until a client that keeps sending finds the connection closed."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < PATIENCE_S:
        try:
            client.sendall(part)
        except OSError:
            break
        time.sleep(pause_s)
    return time.monotonic() - start_s


def closed_after_s(client):
    """Seconds until the server closes the connection, and the bytes it sent before."""
    start_s, received = time.monotonic(), b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionError:
        pass
    return time.monotonic() - start_s, received


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /tok", HEADERS, HEADERS + KEY + b"Content-Length: 100\r\n\r\n" + b'{"prompt'],
    ids=["nothing", "part of a line", "headers", "part of a body"],
)
def test_incomplete_request_is_closed_after_the_timeout(address, sent):
    with connected(address) as client:
        client.sendall(sent)

        seconds, received = closed_after_s(client)

    assert received == b""
    assert TIMEOUT_S * 0.8 < seconds < TIMEOUT_S * 10


def test_slowly_sent_headers_are_closed_after_the_timeout(address):
    with connected(address) as client:
        client.sendall(HEADERS)

        assert sending_fails_after_s(client, b"X: y\r\n", TIMEOUT_S / 5) < TIMEOUT_S * 10


def test_slowly_sent_body_is_accepted(address):
    with connected(address) as client:
        client.sendall(HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for byte in BODY:
            client.sendall(bytes([byte]))
            time.sleep(TIMEOUT_S * 2 / len(BODY))
        response = response_of(client)

    assert response.startswith(b"HTTP/1.1 200")


def test_timeout_restarts_for_each_request_of_a_connection(address):
    with connected(address) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            assert response_of(client).startswith(b"HTTP/1.1 200")
            time.sleep(TIMEOUT_S * 0.8)
        client.sendall(HEADERS)
        seconds, received = closed_after_s(client)

    assert received == b""
    assert seconds < TIMEOUT_S * 10


def test_response_can_take_longer_than_the_header_timeout(address, monkeypatch):
    def slow(tokenizer, text, **options):
        time.sleep(TIMEOUT_S * 2)
        return encode_prompt(tokenizer, text, **options)

    monkeypatch.setattr("quire.serve.text.encode_prompt", slow)
    with connected(address) as client:
        client.sendall(WHOLE)

        assert response_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [b"", KEY], ids=["no key", "a key"])
def test_endless_chunked_body_is_refused_and_closed(address, key):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connected(address) as client:
        client.sendall(HEADERS + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)

        assert sending_fails_after_s(client, chunk, 0.01) < TIMEOUT_S * 12


@pytest.mark.parametrize(("key", "status"), [(b"", b"401"), (KEY, b"413")])
def test_too_large_body_is_refused_before_it_is_read(address, key, status):
    with connected(address) as client:
        client.sendall(HEADERS + key + b"Content-Length: 10000000\r\n\r\n")

        assert client.recv(65536).startswith(b"HTTP/1.1 " + status)


MESSAGES = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (KEY + b"Content-Length: 10000000\r\n\r\n", b"413", b"request_too_large"),
        (b"X: " + b"y" * 70_000, b"431", b"invalid_request_error"),
        (b"X : y\r\n\r\n", b"400", b"BadRequestError"),  # the path is not known
    ],
)
def test_refusals_before_the_application_have_the_format_of_the_path_and_an_id(
    address, sent, status, kind
):
    with connected(address) as client:
        client.sendall(MESSAGES + sent)
        response = response_of(client)

    assert response.startswith(b"HTTP/1.1 " + status)
    assert b'"type":"%s"' % kind in response
    assert b"\r\nx-request-id: " in response.lower()
