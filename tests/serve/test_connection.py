"""Connections over real sockets: timeouts of incomplete requests, addresses."""

import asyncio
import resource
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection

import pytest
import uvicorn

from quire.errors import ConfigError
from quire.layout.values import raise_file_limit
from quire.models.tokenizer import encode_prompt
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.connection import TimedConnection, bind, listen
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import PATIENCE_S

TIMEOUT_S = 600.0
KEY = b"Authorization: Bearer sk-a-2f0c77d1\r\n"
HEADERS = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Once"}'
WHOLE = HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can move on."""

    skipped_s = 0.0
    address = None

    def time(self):
        return super().time() + self.skipped_s

    def skip(self, seconds):
        """Move the clock on between the events of the sockets before and those after this call."""
        self.handle_events()
        self.call_soon_threadsafe(self._skip, seconds)
        self.handle_events()

    def _skip(self, seconds):
        self.skipped_s += seconds

    def handle_events(self):
        """Wait until the server has seen what was sent before: events are handled in order."""
        connection = HTTPConnection(*self.address, timeout=PATIENCE_S)
        connection.request("GET", "/version")
        connection.getresponse().read()
        connection.close()


@pytest.fixture(scope="module")
def loop(llm):
    app = create_app(
        llm, ServerConfig(max_body="1MiB"), tenant_keys=TenantKeys({"a": ("sk-a-2f0c77d1",)})
    )
    protocol = partial(TimedConnection, header_timeout_s=TIMEOUT_S)
    options = {"ws": "none", "log_level": "warning", "timeout_keep_alive": 100 * TIMEOUT_S}
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, **options))
    loop = Loop()

    def run(bound):
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(sockets=[bound]))

    with bind("127.0.0.1", 0) as bound:
        listen(bound)
        loop.address = bound.getsockname()
        thread = threading.Thread(target=run, args=(bound,))
        thread.start()
        yield loop
        server.should_exit = True
        thread.join()


@contextmanager
def connected(loop):
    with socket.create_connection(loop.address, timeout=PATIENCE_S) as client:
        yield client


def response_of(client):
    """A complete response of /tokenize; its JSON ends with a brace."""
    received = b""
    while not received.endswith(b"}"):
        received += client.recv(65536)
    return received


def is_closed_after_the_timeout(client, loop):
    """Whether an incomplete request is closed after the timeout and not before."""
    loop.skip(TIMEOUT_S * 0.8)
    was_closed = is_closed(client)
    loop.skip(TIMEOUT_S * 0.4)
    return is_closed(client) and not was_closed


def is_closed(client):
    """Whether the server has closed the connection, without sending anything."""
    client.setblocking(False)
    try:
        return client.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        client.settimeout(PATIENCE_S)


def sends_until_closed(client, loop, part, seconds):
    """How often a client can send a part every so many seconds."""
    client.setblocking(False)
    unsent = b""
    for number in range(1_000):
        unsent = unsent or part
        try:
            with suppress(BlockingIOError):
                unsent = unsent[client.send(unsent) :]
        except ConnectionError:
            return number
        loop.skip(seconds)
    raise AssertionError("the connection stays open")


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /tok", HEADERS, HEADERS + KEY + b"Content-Length: 100\r\n\r\n" + b'{"prompt'],
    ids=["nothing", "part of a line", "headers", "part of a body"],
)
def test_incomplete_request_is_closed_after_the_timeout(loop, sent):
    with connected(loop) as client:
        client.sendall(sent)
        assert is_closed_after_the_timeout(client, loop)


def test_slowly_sent_headers_are_closed_after_the_timeout(loop):
    with connected(loop) as client:
        client.sendall(HEADERS)
        assert 5 <= sends_until_closed(client, loop, b"X: y\r\n", TIMEOUT_S / 5) <= 7


def test_slowly_sent_body_is_accepted(loop):
    with connected(loop) as client:
        client.sendall(HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for byte in BODY:
            client.sendall(bytes([byte]))
            loop.skip(TIMEOUT_S * 2 / len(BODY))
        response = response_of(client)

    assert response.startswith(b"HTTP/1.1 200")


def test_timeout_restarts_for_each_request_of_a_connection(loop):
    with connected(loop) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            assert response_of(client).startswith(b"HTTP/1.1 200")
            loop.skip(TIMEOUT_S * 0.8)
        client.sendall(HEADERS)
        assert is_closed_after_the_timeout(client, loop)


def test_response_can_take_longer_than_the_header_timeout(loop, monkeypatch):
    def slow(tokenizer, text, **options):
        loop.skip(TIMEOUT_S * 2)
        return encode_prompt(tokenizer, text, **options)

    monkeypatch.setattr("quire.serve.text.encode_prompt", slow)
    with connected(loop) as client:
        client.sendall(WHOLE)
        assert response_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [b"", KEY], ids=["no key", "a key"])
def test_endless_chunked_body_is_refused_and_closed(loop, key):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connected(loop) as client:
        client.sendall(HEADERS + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        sends_until_closed(client, loop, chunk, TIMEOUT_S / 10)


@pytest.mark.parametrize(("key", "status"), [(b"", b"401"), (KEY, b"413")])
def test_too_large_body_is_refused_before_it_is_read(loop, key, status):
    with connected(loop) as client:
        client.sendall(HEADERS + key + b"Content-Length: 10000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 " + status)


TO_MESSAGES = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (KEY + b"Content-Length: 10000000\r\n\r\n", b"413", b"request_too_large"),
        (b"X: " + b"y" * 70_000, b"431", b"invalid_request_error"),
        (b"X : y\r\n\r\n", b"400", b"BadRequestError"),  # the path is not known
    ],
)
def test_refusals_before_the_application_have_the_format_of_the_path_and_an_id(
    loop, sent, status, kind
):
    with connected(loop) as client:
        client.sendall(TO_MESSAGES + sent)
        response = response_of(client)
    assert response.startswith(b"HTTP/1.1 " + status)
    assert b'"type":"%s"' % kind in response
    assert b"\r\nx-request-id: " in response.lower()


# ---- invalid addresses are refused with one line -------------------------------------------------


def test_port_in_use_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["x..y", "x\0y", "a" * 300, "\u00e9" * 80, "256.1.1.1"])
def test_invalid_host_is_refused(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .* choose another --host"):
        bind(host, 0)
    with pytest.raises(ConfigError, match=r"expected a host address, got an empty string"):
        ServerConfig(host="")


def test_limit_of_open_files_is_raised_to_the_hard_limit():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 100, hard))
    try:
        raise_file_limit()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
