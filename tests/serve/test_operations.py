"""Operation of the server: back-pressure, CORS, TLS, large headers, keep-alives and the end."""

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager

import httpx
import pytest

from quire.api.async_llm import QueueLimit, ServedRate
from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, QueueFull
from quire.serve import streaming
from quire.serve.app import banner, concurrent_requests, create_app, uvicorn_config
from quire.serve.config import ServerConfig
from quire.serve.service import Service
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import PATIENCE_S, PROMPT, wait_until
from support.forking import Program

LONG = {"prompt": [5] * 8, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


# ---- back-pressure -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_full_queue_is_refused_with_a_time_to_wait(serve, llm, option):
    async def main(client):
        many = [client.post("/v1/completions", json=LONG) for _ in range(40)]
        return await asyncio.gather(*many)

    responses = serve(main, **{option: 1})

    refused = [r for r in responses if r.status_code == 503]
    assert refused
    assert all(1 <= int(r.headers["retry-after"]) <= 60 for r in refused)
    assert (
        "are waiting" in refused[0].json()["error"]["message"]
        or "waiting requests" in (refused[0].json()["error"]["message"])
    )
    assert {r.status_code for r in responses} == {200, 503}


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
    rate = ServedRate()
    assert rate.per_s == 0.0
    for _ in range(300):  # two requests end in every tenth step
        for step in range(10):
            rate.add(0.1, 2 * (step == 9))

    assert rate.per_s == pytest.approx(2.0)


def test_requests_that_end_in_one_step_took_the_time_before_it():
    rate = ServedRate()
    rate.add(8.0, 0)
    rate.add(2.0, 50)

    assert rate.per_s == pytest.approx(5.0)


# ---- web pages -----------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_preflight_of_an_allowed_origin_needs_no_key(serve):
    from quire.serve.tenant_keys import TenantKeys

    keys = TenantKeys({"a": ("sk-a-2f0c77d1",)})
    response = serve(
        lambda client: client.options("/v1/completions", headers=PREFLIGHT),
        tenant_keys=keys,
        allowed_origins=("https://chat.example",),
    )

    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"


def test_other_origins_get_no_permission(serve):
    for options in ({}, {"allowed_origins": ("https://other.example",)}):
        response = serve(
            lambda client: client.get("/version", headers={"origin": "https://chat.example"}),
            **options,
        )
        assert "access-control-allow-origin" not in response.headers


def test_credentials_of_all_origins_are_refused():
    with pytest.raises(ConfigError, match="allow-credentials"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)


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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.mark.slow
def test_dead_engine_ends_the_process_with_an_error():
    body = LONG | {"prompt": "Once upon a time", "max_tokens": 400}
    with Server(dies=True) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        health = httpx.get(f"{server.url}/health").status_code
        code = server.wait(PATIENCE_S)
        log = server.stderr.read()

    assert answer.status_code == 503
    assert "a broken kernel" in answer.json()["error"]["message"]
    assert health == 503
    assert code == 2
    assert "the server shuts down with an error" in log


@pytest.mark.slow
def test_stopped_server_finishes_running_requests():
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with Server(served_model_name="tiny") as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            first = next(lines)
            ready = httpx.get(f"{server.url}/ready").status_code
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            health = httpx.get(f"{server.url}/health").status_code
            refused = httpx.post(url, json=body)
            rest = [line for line in lines if line]
        code = server.wait(PATIENCE_S)
        remaining = server.stdout.read()

    assert server.lines[-1].startswith("Serving tiny at http://127.0.0.1:")
    assert '"text"' in first
    assert (ready, health) == (200, 200)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailable")
    assert "shutting down" in refused.json()["error"]["message"]
    assert '"finish_reason": "length"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert code == 0
    assert remaining == ""


def test_second_signal_ends_open_requests():
    body = LONG | {"max_tokens": 1900, "stream": True}
    with (
        Server(shutdown_timeout=600.0, memory="32MiB") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as got,
    ):
        assert got.status_code == 200
        lines = got.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
        code = server.wait(PATIENCE_S)
        log = server.stderr.read()

    assert code == 0
    assert "the server has shut down before the request ended" in text
    assert "Traceback" not in log


def test_requests_over_the_shutdown_timeout_get_an_error_and_no_traceback():
    whole = LONG | {"max_tokens": 1900}
    found = {}

    def post(name, body):
        found[name] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)

    with Server(shutdown_timeout=1.0, memory="32MiB") as server:
        host, port = server.url.removeprefix("http://").split(":")
        bodies = {"whole": whole, "stream": whole | {"stream": True}}
        threads = [threading.Thread(target=post, args=pair) for pair in bodies.items()]
        for thread in threads:
            thread.start()
        wait_until(lambda: open_requests(server) == 2)
        with (
            slow_reader(host, int(port), whole | {"stream": True, "n": 8, "logprobs": 5}),
            httpx.stream("GET", f"{server.url}/v1/kv/events/stream", timeout=PATIENCE_S) as events,
        ):
            next(events.iter_lines())
            wait_until(lambda: open_requests(server) > 2)
            server.send_signal(signal.SIGTERM)
            code = server.wait(PATIENCE_S)
        for thread in threads:
            thread.join()
        log = server.stderr.read()

    assert code == 0
    assert found["whole"].status_code == 503
    assert found["whole"].json()["error"]["message"].startswith("the server has shut down before")
    *_, error, done, _ = found["stream"].text.split("\n\n")
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


@contextmanager
def slow_reader(host, port, body):
    """A client that never reads its stream."""
    content = json.dumps(body)
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n{content}"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((host, port))
        client.sendall(request.encode())
        yield


def test_shutdown_without_open_requests_does_not_count_them():
    with Server() as server:
        httpx.get(f"{server.url}/version")  # from now on signals are handled
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
        log = server.stderr.read()

    assert log.count("shutting down") == 1
    assert "open requests" not in log


def test_tls_serves_https(certificate):
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


def test_start_names_model_memory_and_concurrency(idle):
    text = "".join(idle.lines)

    assert "Model: quire-tiny, float32 on cpu" in text
    assert "KV memory: 4,194,304 B (4.00 MiB), 256 pages of 16,384 B, float32" in text
    assert "Requests that the KV memory holds: 1 of 512 tokens, 0 of 2,048 tokens" in text
    assert "Sampling of requests that set none: temperature 0 (the model's)" in text


def test_headers_over_the_limit_are_refused_as_json(idle):
    host, port = idle.url.removeprefix("http://").split(":")
    whole = httpx.get(f"{idle.url}/version", headers={"x": "a" * 70_000})
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 70_000)
        parts = received(client)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(b"this is not HTTP\r\n\r\n")
        wrong = received(client)

    assert whole.status_code == 431
    assert whole.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"
    assert parts.startswith("HTTP/1.1 431 ")
    assert '"code":431' in parts
    assert wrong.startswith("HTTP/1.1 400 ")
    assert '"code":400' in wrong


def received(client):
    """Everything that the server sends until it closes the connection."""
    parts = []
    while parts == [] or parts[-1]:
        parts.append(client.recv(65_536))
    return b"".join(parts).decode()


# ---- in process ----------------------------------------------------------------------------------


def test_banner_counts_requests_that_fit(llm):
    service = Service(llm, ServerConfig())

    assert "attention " in banner(service)
    tokens = 100
    held = [concurrent_requests(llm, tokens), concurrent_requests(llm, 2 * tokens)]
    assert held[0] >= 2 * held[1] > 0
    assert concurrent_requests(llm, 100_000) == 0


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
    service = Service(llm, ServerConfig(**options), TenantKeys(keys))

    assert ("Warning: no API key is set" in banner(service)) == warns


def test_banner_names_what_pages_of_each_size_hold():
    kv = KVConfig(memory="4MiB", evict="h2o:cap=64")
    llm = LLM("quire-tiny", dtype="float32", kv=kv, verify=False)

    text = banner(Service(llm, ServerConfig()))

    assert "KV in pages of 4,224 B, eviction statistics in pages of 64 B, float32" in text


def test_banner_names_the_longest_request_and_the_memory_of_the_whole_context():
    def lines(memory: str) -> list[str]:
        llm = LLM("quire-tiny", dtype="float32", kv=KVConfig(memory=memory), verify=False)
        return banner(Service(llm, ServerConfig())).splitlines()

    [line] = [line for line in lines("4MiB") if line.startswith("Longest request: ")]
    found = re.search(r"--kv-memory (\d+)MiB holds", line)

    assert re.match(r"Longest request: [\d,]+ of the 4,096 tokens of the model's context; ", line)
    assert found is not None
    whole = int(found[1])
    for memory in ("1MiB", "3MiB", "16MiB"):  # whose slabs have other sizes
        assert any(f"--kv-memory {whole}MiB holds the whole" in line for line in lines(memory))
    assert not any("Warning" in line for line in lines("4MiB"))
    [warning] = [line for line in lines("1MiB") if line.startswith("Warning: ")]
    usual = re.search(r"too small for one request of 512 tokens; --kv-memory (\d+)MiB", warning)
    assert usual is not None
    assert not any("Warning" in line for line in lines(f"{usual[1]}MiB"))
    assert not any("Longest request" in line for line in lines(f"{whole}MiB"))
    assert any("Longest request" in line for line in lines(f"{whole - 1}MiB"))


def test_quiet_stream_gets_comments():
    sent = []

    async def send(message):
        sent.append(message)

    async def main():
        alive = streaming._KeptAlive(send, 0.01)
        await alive({"type": "http.response.start"})
        while len(sent) < 3:
            await asyncio.sleep(0.005)
        await alive({"type": "http.response.body", "body": b"end", "more_body": False})
        number = len(sent)
        await asyncio.sleep(0.05)
        return number

    number = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    assert sent[1]["body"] == sent[2]["body"] == b": keep-alive\n\n"
    assert sent[-1]["body"] == b"end"
    assert len(sent) == number


def test_comments_can_be_turned_off():
    async def main():
        alive = streaming._KeptAlive(lambda _: asyncio.sleep(0), 0.0)
        await alive({"type": "http.response.start"})
        return alive._task

    assert asyncio.run(main()) is None


@pytest.mark.parametrize(
    "options",
    [
        {"requests_per_minute": 0},
        {"max_num_queued_reqs": -1},
        {"shutdown_timeout": -1.0},
        {"sse_keep_alive_interval": float("inf")},
        {"allowed_origins": "https://chat.example"},
        {"allowed_origins": ('["*"]',)},
        {"allowed_origins": ("chat.example",)},
        {"allowed_origins": ("https://chat.example/",)},
        {"log_format": "xml"},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", ".")):
        ServerConfig(**options)


def test_origins_have_a_scheme_and_a_host():
    ServerConfig(allowed_origins=("*", "https://chat.example", "http://[::1]:3000", "app://x"))
