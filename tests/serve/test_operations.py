"""Operation: back-pressure, CORS, TLS, clients that leave, shutdown, crashes, timeouts."""

import asyncio
import json
import logging
import re
import resource
import signal
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection

import httpx
import pytest
import uvicorn

from quire.api.async_llm import QueueLimit, ServedRate
from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, QueueFull
from quire.layout.values import raise_file_limit
from quire.models.tokenizer import encode_prompt
from quire.serve import streaming
from quire.serve.app import banner, concurrent_requests, create_app, uvicorn_config
from quire.serve.config import ServerConfig
from quire.serve.connection import TimedConnection, bind, listen
from quire.serve.service import Service
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import CHATS, COMPLETIONS, PATIENCE_S, PROMPT, wait_until
from support.busy_server import server_process
from support.disconnecting import DisconnectingClient, until
from support.forking import Program

LONG = {"prompt": [5] * 8, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


# ---- back-pressure -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_full_queue_is_refused_with_a_time_to_wait(serve, option):
    async def main(client):
        return await asyncio.gather(*[client.post(COMPLETIONS, json=LONG) for _ in range(40)])

    responses = serve(main, **{option: 1})
    refused = [response for response in responses if response.status_code == 503]
    assert refused
    assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)
    assert re.search("are waiting|waiting requests", refused[0].json()["error"]["message"])
    assert {response.status_code for response in responses} == {200, 503}


def test_retry_time_follows_the_rate(llm):
    request = GenerationRequest([5] * 4, SamplingParams(max_tokens=1))
    ids = [llm.engine.submit(request) for _ in range(6)]
    try:
        limit = QueueLimit(requests=6)
        for rate, wait_s in ((0.0, 2.0), (0.01, 60.0), (2.0, 3.0), (600.0, 1.0)):
            with pytest.raises(QueueFull) as refused:
                limit.check(llm.engine, rate)
            assert refused.value.retry_after_s == wait_s
        QueueLimit(requests=7, tokens=25).check(llm.engine, 0.0)
        with pytest.raises(QueueFull, match="have 24 tokens"):
            QueueLimit(tokens=24).check(llm.engine, 0.0)
    finally:
        for request_id in ids:
            llm.engine.cancel(request_id)
        while llm.engine.has_work:
            llm.engine.step()


def test_rate_of_served_requests_does_not_count_idle_time():
    """Requests that end in one step took the time before it."""
    rate, late = ServedRate(), ServedRate()
    assert rate.per_s == 0.0
    for _ in range(300):  # two requests end in every tenth step
        for step in range(10):
            rate.add(0.1, 2 * (step == 9))
    late.add(8.0, 0)
    late.add(2.0, 50)

    assert (rate.per_s, late.per_s) == (pytest.approx(2.0), pytest.approx(5.0))


# ---- web pages -----------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_preflight_of_an_allowed_origin_needs_no_key_and_others_get_none(send, get):
    origin, keys = "https://chat.example", TenantKeys({"a": ("sk-a-2f0c77d1",)})
    call = ("OPTIONS", COMPLETIONS, {"headers": PREFLIGHT})
    [response] = send(call, tenant_keys=keys, allowed_origins=(origin,))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    for options in ({}, {"allowed_origins": ("https://other.example",)}):
        response = get("/version", {"origin": "https://chat.example"}, **options)
        assert "access-control-allow-origin" not in response.headers


def test_idle_connections_stay_open_longer_than_those_of_nginx(llm):
    default, short = ServerConfig(), ServerConfig(timeout_keep_alive=2.5)
    assert uvicorn_config(create_app(llm, default), default).timeout_keep_alive > 60
    assert uvicorn_config(create_app(llm, short), short).timeout_keep_alive == 2.5


# ---- tls -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


def test_tls_files_are_checked_before_the_start(llm, tmp_path):
    config = ServerConfig(ssl_certfile=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"cannot use --ssl-certfile .*none\.pem"):
        uvicorn_config(create_app(llm, config), config)
    with pytest.raises(ConfigError, match="expected --ssl-certfile with"):
        ServerConfig(ssl_keyfile="key.pem")


# ---- a server in its own process -----------------------------------------------------------------


class Server(Program):
    """A server process; `url` is its address without /v1."""

    def __init__(self, **options):
        super().__init__("support.tiny_server:run_tiny_server", options)
        self.lines = []
        while not self.lines or not self.lines[-1].startswith("Serving "):
            line = self.stdout.readline()
            assert line, self.stderr.read()
            self.lines.append(line)
        self.url = self.lines[-1].split()[-1].removesuffix("/v1")
        self.completions = f"{self.url}{COMPLETIONS}"
        host, port = self.url.rpartition("/")[2].split(":")
        self.address = host, int(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def status(self, path):
        return httpx.get(f"{self.url}{path}").status_code

    def drain(self):
        self.send_signal(signal.SIGTERM)
        wait_until(lambda: self.status("/ready") == 503)


@pytest.mark.slow
def test_dead_engine_ends_the_process_with_an_error():
    body = LONG | {"prompt": "Once upon a time", "max_tokens": 400}
    with Server(dies=True) as server:
        answer = httpx.post(server.completions, json=body, timeout=PATIENCE_S)
        health, code = server.status("/health"), server.wait(PATIENCE_S)
        log = server.stderr.read()
    assert (answer.status_code, health, code) == (503, 503, 2)
    assert "a broken kernel" in answer.json()["error"]["message"]
    assert "the server shuts down with an error" in log


@pytest.mark.slow
def test_stopped_server_finishes_running_requests():
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with Server(served_model_name="tiny") as server:
        url = server.completions
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            first, ready = next(lines), server.status("/ready")
            server.drain()
            health, refused = server.status("/health"), httpx.post(url, json=body)
            *_, finished, done = [line for line in lines if line]
        code, remaining = server.wait(PATIENCE_S), server.stdout.read()

    assert server.lines[-1].startswith("Serving tiny at http://127.0.0.1:")
    assert '"text"' in first
    assert (ready, health) == (200, 200)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailable")
    assert "shutting down" in refused.json()["error"]["message"]
    assert '"finish_reason": "length"' in finished
    assert (done, code, remaining) == ("data: [DONE]", 0, "")


@pytest.mark.slow
def test_second_signal_ends_open_requests():
    body = LONG | {"max_tokens": 1900, "stream": True}
    with (
        Server(shutdown_timeout=600.0, memory="32MiB") as server,
        httpx.stream("POST", server.completions, json=body, timeout=PATIENCE_S) as got,
    ):
        assert got.status_code == 200
        lines = got.iter_lines()
        next(lines)
        server.drain()
        server.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
        code, log = server.wait(PATIENCE_S), server.stderr.read()

    assert code == 0
    assert "the server has shut down before the request ended" in text
    assert "Traceback" not in log


@pytest.mark.slow
def test_requests_over_the_shutdown_timeout_get_an_error_and_no_traceback():
    whole = LONG | {"max_tokens": 1900}
    endless = json.dumps(whole | {"stream": True, "n": 8, "logprobs": 5})
    unread = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    unread += f"Content-Length: {len(endless)}\r\n\r\n{endless}"

    def post(body):
        return httpx.post(server.completions, json=body, timeout=PATIENCE_S)

    with Server(shutdown_timeout=1.0, memory="32MiB") as server, ThreadPoolExecutor() as pool:
        calls = [pool.submit(post, body) for body in (whole, whole | {"stream": True})]
        wait_until(lambda: open_requests(server) == 2)
        with (
            socket.socket() as client,  # never reads its stream
            httpx.stream("GET", f"{server.url}/v1/kv/events/stream", timeout=PATIENCE_S) as events,
        ):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(server.address)
            client.sendall(unread.encode())
            next(events.iter_lines())
            wait_until(lambda: open_requests(server) > 2)
            server.send_signal(signal.SIGTERM)
            code = server.wait(PATIENCE_S)
        answer, streamed = (call.result() for call in calls)
        log = server.stderr.read()

    assert (code, answer.status_code) == (0, 503)
    assert answer.json()["error"]["message"].startswith("the server has shut down before")
    *_, error, done, _ = streamed.text.split("\n\n")
    assert '"code":503' in error.replace(" ", "")
    assert done == "data: [DONE]"
    assert "Traceback" not in log
    assert " 500 in " not in log
    assert "open requests may continue for 1 s" in log
    assert "open requests were ended" in log


def open_requests(server):
    """Number of requests that run or wait."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r"^quire_requests_(?:running|waiting)\{.*\} (.*)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.slow
def test_shutdown_counts_only_open_requests_and_tls_serves_https(certificate):
    with Server() as server:
        server.status("/version")  # from now on signals are handled
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
        log = server.stderr.read()

    assert log.count("shutting down") == 1
    assert "open requests" not in log

    files = {"ssl_certfile": f"{certificate}/cert.pem", "ssl_keyfile": f"{certificate}/key.pem"}
    with Server(**files, log_format="json") as server:
        context = ssl.create_default_context(cafile=f"{certificate}/cert.pem")
        answer = httpx.get(f"{server.url}/version", verify=context)
    assert server.url.startswith("https://")
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def idle():
    """A server process that no test ends."""
    with Server() as server:
        yield server


def test_start_and_banner_name_model_memory_and_requests_that_fit(idle, llm):
    text = "".join(idle.lines)
    assert "Model: quire-tiny, float32 on cpu" in text
    assert "KV memory: 4,194,304 B (4.00 MiB), 256 pages of 16,384 B, float32" in text
    assert "Requests that the KV memory holds: 1 of 512 tokens, 0 of 2,048 tokens" in text
    assert "Sampling of requests that set none: temperature 0 (the model's)" in text
    assert "attention " in banner(Service(llm, ServerConfig()))
    held, of_twice = (concurrent_requests(llm, tokens) for tokens in (100, 200))
    assert held >= 2 * of_twice > 0
    assert concurrent_requests(llm, 100_000) == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 70_000, 431),
        (b"this is not HTTP\r\n\r\n", 400),
    ],
)
def test_headers_over_the_limit_are_refused_as_json(idle, sent, status):
    with socket.create_connection(idle.address, timeout=PATIENCE_S) as client:
        client.sendall(sent)
        received = b"".join(iter(partial(client.recv, 65_536), b"")).decode()

    assert received.startswith(f"HTTP/1.1 {status} ")
    assert f'"code":{status}' in received
    whole = httpx.get(f"{idle.url}/version", headers={"x": "a" * 70_000})
    assert whole.status_code == 431
    assert whole.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"


# ---- in process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keys", "warns"),
    [
        ({}, {}, False),
        ({"host": "0.0.0.0"}, {}, True),
        ({"host": "::"}, {"default": ("sk-a-2f0c77d1",)}, False),
        ({"host": "::", "ssl_certfile": "a.pem", "ssl_ca_certs": "b.pem"}, {}, False),
    ],
)
def test_banner_warns_of_an_open_address_without_keys(llm, options, keys, warns):
    text = banner(Service(llm, ServerConfig(**options), TenantKeys(keys)))
    assert ("Warning: no API key is set" in text) == warns


@pytest.mark.slow
def test_banner_names_the_longest_request_and_the_memory_of_the_whole_context():
    def lines(memory, **kv):
        kv = KVConfig(memory=memory, **kv)
        llm = LLM("quire-tiny", dtype="float32", kv=kv, verify=False)
        return banner(Service(llm, ServerConfig())).splitlines()

    def beginning(text, memory):
        return [line for line in lines(memory) if line.startswith(text)]

    [line] = beginning("Longest request: ", "4MiB")
    assert re.match(r"Longest request: [\d,]+ of the 4,096 tokens of the model's context; ", line)
    whole = int(re.search(r"--kv-memory (\d+)MiB holds", line)[1])
    for memory in ("1MiB", "3MiB", "16MiB"):  # whose slabs have other sizes
        assert any(f"--kv-memory {whole}MiB holds the whole" in line for line in lines(memory))
    assert not beginning("Warning", "4MiB")
    [warning] = beginning("Warning: ", "1MiB")
    usual = re.search(r"too small for one request of 512 tokens; --kv-memory (\d+MiB)", warning)
    assert not beginning("Warning", usual[1])
    assert not beginning("Longest request", f"{whole}MiB")
    assert beginning("Longest request", f"{whole - 1}MiB")
    text = "\n".join(lines("4MiB", evict="h2o:cap=64"))
    assert "KV in pages of 4,224 B, eviction statistics in pages of 64 B, float32" in text


def test_quiet_stream_gets_comments():
    sent = []

    async def send(message):
        sent.append(message["type"] == "http.response.body" and message["body"])

    async def main():
        alive = streaming._KeptAlive(send, 0.01)
        await alive({"type": "http.response.start"})
        while len(sent) < 3:
            await asyncio.sleep(0.005)
        await alive({"type": "http.response.body", "body": b"end", "more_body": False})
        number = len(sent)
        await asyncio.sleep(0.05)
        off = streaming._KeptAlive(lambda _: asyncio.sleep(0), 0.0)
        await off({"type": "http.response.start"})
        return number, off._task

    number, task = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert sent[1] == sent[2] == b": keep-alive\n\n"
    assert (sent[-1], len(sent)) == (b"end", number)
    assert task is None  # comments can be turned off


@pytest.mark.parametrize(
    "options",
    [
        *({"requests_per_minute": 0}, {"max_num_queued_reqs": -1}, {"shutdown_timeout": -1.0}),
        *({"sse_keep_alive_interval": float("inf")}, {"log_format": "xml"}),
        *({"allowed_origins": "https://chat.example"}, {"allowed_origins": ('["*"]',)}),
        *({"allowed_origins": (one,)} for one in ("chat.example", "https://chat.example/")),
        {"allow_credentials": True, "allowed_origins": ("*",)},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", ".")):
        ServerConfig(**options)
    ServerConfig(allowed_origins=("*", "https://chat.example", "http://[::1]:3000", "app://x"))


# ---- clients that disconnect: their requests are cancelled and their KV is freed -----------------

MAX_TOKENS = 400
ENDLESS = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
BODIES = {
    COMPLETIONS: {"prompt": "<|doc|>A", **ENDLESS},
    CHATS: {"messages": [{"role": "user", "content": "A"}], **ENDLESS},
}


@pytest.fixture
def disconnected(llm, serve):
    """A call whose client leaves once a condition is true; what was sent, and the path `then`."""

    def run(path, body, leaves, then=None):
        async def main(other):
            client, app = DisconnectingClient(path, body), other._transport.app
            call = asyncio.create_task(app(client.scope, client.receive, client.send))
            await until(leaves)
            client.disconnect.set()
            await call
            await until(lambda: not llm.engine.has_work)
            return client.sent, then and await other.get(then)

        return serve(main)

    return run


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_requests(llm, disconnected, path, stream):
    before = llm.engine.num_generated_tokens
    body = BODIES[path] | {"n": 2, "stream": stream}
    sent, _ = disconnected(path, body, lambda: llm.engine.num_generated_tokens > before + 2)
    assert llm.engine.num_generated_tokens - before < MAX_TOKENS
    assert any(b"data: " in message.get("body", b"") for message in sent) == stream


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, BODIES[COMPLETIONS]), ("/v1/embeddings", {"input": [[5] * 400] * 40})],
)
def test_disconnect_before_the_response_is_logged_and_counted_as_499(
    llm, disconnected, caplog, path, body
):
    caplog.set_level(logging.INFO, logger="quire.access")
    _, metrics = disconnected(path, body, lambda: llm.engine.has_work, "/metrics")

    lines = [r.getMessage() for r in caplog.records if r.name == "quire.access"]
    assert [line.split(" in ")[0] for line in lines if "POST" in line] == [f"POST {path} 499"]
    [counted] = re.findall("^quire_http_requests_total.*", metrics.text, re.MULTILINE)
    assert f'path="{path}"' in counted
    assert 'status="499"' in counted


def test_disconnect_before_the_first_event_cancels_the_request(llm, serve):
    """Its stream is never iterated, so the stream cannot cancel the request."""
    before = llm.engine.num_generated_tokens

    async def main(other):
        client = DisconnectingClient(COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})

        async def refuse(_message):
            client.disconnect.set()
            await asyncio.Event().wait()

        await other._transport.app(client.scope, client.receive, refuse)
        await until(lambda: not llm.engine.has_work)

    serve(main)
    assert llm.engine.num_generated_tokens - before < MAX_TOKENS


# ---- a process under load that is killed and restarted, or asked to end --------------------------

CLIENTS = 48


async def ended_stream(client, url, number, started):
    """The end of one stream: "[DONE]", an error of the connection, or a status."""
    body = {"prompt": f"<|doc|>{number}", "max_tokens": 120, "ignore_eos": True, "stream": True}
    last = ""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                last = line or last
                started.add(number)
    except httpx.TransportError as error:
        return type(error).__name__
    return last.removeprefix("data: ")


async def interrupted(process, url, signal_number, late):
    """Send a signal while all streams run; return their ends, and those of later requests."""
    started = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        tasks = [asyncio.create_task(ended_stream(client, url, n, started)) for n in range(CLIENTS)]
        while len(started) < CLIENTS:
            await asyncio.sleep(0.01)
        process.send_signal(signal_number)
        later = []
        for number in range(late):
            await asyncio.sleep(0.05)
            later.append(await ended_stream(client, url, CLIENTS + number, set()))
        return await asyncio.gather(*tasks), later


@pytest.mark.slow
def test_killed_server_restarts_at_its_port_and_no_client_hangs():
    with server_process() as (process, url):
        ends, _ = asyncio.run(interrupted(process, url, signal.SIGKILL, 0))
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    with server_process("--port", url.rsplit(":", 1)[1]) as (_, restarted):
        body = {"prompt": "<|doc|>Once", "max_tokens": 3}
        answer = httpx.post(f"{restarted}{COMPLETIONS}", json=body, timeout=PATIENCE_S)
        memory = httpx.get(f"{restarted}/v1/kv/overview").json()["memory"]

    assert restarted == url
    assert len(ends) == CLIENTS
    assert set(ends) <= {"RemoteProtocolError", "ReadError"}
    assert (answer.status_code, memory["requests_bytes"]) == (200, 0)


@pytest.mark.slow
def test_sigterm_under_load_finishes_streams_and_refuses_new_requests():
    with server_process() as (process, url):
        ends, later = asyncio.run(interrupted(process, url, signal.SIGTERM, 3))
        assert process.wait(PATIENCE_S) == 0
    assert ends == ["[DONE]"] * CLIENTS
    assert later == ["503"] * 3


# ---- connections ---------------------------------------------------------------------------------


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


def test_slowly_sent_headers_are_closed_and_bodies_accepted(loop):
    with connected(loop) as client:
        client.sendall(HEADERS)
        assert 5 <= sends_until_closed(client, loop, b"X: y\r\n", TIMEOUT_S / 5) <= 7

    with connected(loop) as client:
        client.sendall(HEADERS + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for byte in BODY:
            client.sendall(bytes([byte]))
            loop.skip(TIMEOUT_S * 2 / len(BODY))
        response = response_of(client)

    assert response.startswith(b"HTTP/1.1 200")


def test_timeout_restarts_for_each_request_and_a_response_may_take_longer(loop, monkeypatch):
    with connected(loop) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            assert response_of(client).startswith(b"HTTP/1.1 200")
            loop.skip(TIMEOUT_S * 0.8)
        client.sendall(HEADERS)
        assert is_closed_after_the_timeout(client, loop)

    def slow(tokenizer, text, **options):
        loop.skip(TIMEOUT_S * 2)
        return encode_prompt(tokenizer, text, **options)

    monkeypatch.setattr("quire.serve.text.encode_prompt", slow)
    with connected(loop) as client:
        client.sendall(WHOLE)
        assert response_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("key", "status"), [(b"", b"401"), (KEY, b"413")])
def test_too_large_body_is_refused_before_it_is_read_and_an_endless_one_closed(loop, key, status):
    with connected(loop) as client:
        client.sendall(HEADERS + key + b"Content-Length: 10000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with connected(loop) as client:
        client.sendall(HEADERS + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        sends_until_closed(client, loop, chunk, TIMEOUT_S / 10)


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


def test_port_in_use_and_invalid_hosts_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}.*--port"):
            bind("127.0.0.1", port)
    for host in ("x..y", "x\0y", "a" * 300, "\u00e9" * 80, "256.1.1.1"):
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
