"""Tenants of a server: keys, access without one, cost of huge bodies, isolation, rate limits."""

import asyncio
import hashlib
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.websockets import WebSocketDisconnect

from quire.errors import ConfigError, RequestError, UnknownName
from quire.serve import rate_limits
from quire.serve.app import create_app
from quire.serve.errors import Unauthorized
from quire.serve.rate_limits import RateLimit, RateLimited, RateLimits
from quire.serve.tenant_keys import (
    OPEN_PATHS,
    KeyGuard,
    TenantFile,
    TenantKeys,
    read_tenant_keys,
    require_keys,
    with_default_keys,
)
from quire.tenancy.tenants import parse_tenants
from serve.conftest import CHATS, COMPLETIONS, JSON, PROMPT, USER, error_of, ok
from support.busy_server import server_process

KEY_A, KEY_B = "sk-a-2f0c77d1", "sk-b-51d09a3e"
KEYS = {"a": (KEY_A, "sk-a-9b2e4410"), "b": (KEY_B,)}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


A, B = bearer(KEY_A), bearer(KEY_B)


def test_key_selects_the_tenant_and_an_unknown_one_is_refused():
    known = {f"Bearer {KEY_A}": "a", "bearer  sk-a-9b2e4410 ": "a", f"Bearer {KEY_B}": "b"}
    for header, tenant in known.items():
        assert TenantKeys(KEYS).tenant_of(header) == tenant
        assert TenantKeys().tenant_of(header) == "default"  # without keys the header is ignored
    for header in ("Bearer unknown", "Bearer", "", f"Basic {KEY_A}", KEY_A, "ü x"):
        with pytest.raises(Unauthorized, match="unknown API key"):
            TenantKeys(KEYS).tenant_of(header)


@pytest.mark.parametrize("specs", ["", "a;b"])
def test_missing_key_is_refused_without_a_default_tenant(specs):
    with pytest.raises(Unauthorized, match="missing API key"):
        TenantKeys(KEYS, parse_tenants(specs) if specs else ()).tenant_of(None)

    specs = parse_tenants("a;b;default")
    assert TenantKeys(KEYS, specs).tenant_of(None) == "default"
    with_key = TenantKeys(KEYS | {"default": ("sk-d-2f0c77d1",)}, specs)
    assert with_key.tenant_of("Bearer sk-d-2f0c77d1") == "default"
    with pytest.raises(Unauthorized, match="missing API key"):
        with_key.tenant_of(None)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"c": ("sk-c-00000000",)}, UnknownName, "unknown tenant with an API key 'c'"),
        ({"a": ("short",)}, ConfigError, "8 printable ASCII characters"),
        ({"a": ("sk-a-\n0000000",)}, ConfigError, "8 printable ASCII characters"),
        ({"a": ("sha256:00ff",)}, ConfigError, "64 hexadecimal digits, got 4 characters"),
        ({"a": (KEY_A,), "b": (KEY_A,)}, ConfigError, "'a' and 'b' have the same"),
        ({"a b": (KEY_A,)}, ConfigError, "tenant name"),
        (None, ConfigError, "give --tenant-keys FILE, or add tenant 'default'"),
        ({}, ConfigError, "give --tenant-keys FILE, or add tenant 'default'"),
        ({"a": ()}, ConfigError, "give --tenant-keys FILE, or add tenant 'default'"),
    ],
)
def test_invalid_keys_are_refused(keys, error, message):
    with pytest.raises(error, match=message):
        TenantKeys(keys, parse_tenants("a;b"))


@pytest.fixture
def read(tmp_path):
    """Read tenants from a file with this text."""

    def of(text):
        path = tmp_path / "keys.toml"
        path.write_text(text)
        return read_tenant_keys(path)

    return of


def test_tenant_file_has_keys_digests_and_limits_and_default_keys_are_added(read):
    assert read(f'a = ["{KEY_A}", "sk-a-9b2e4410"]\nb = "{KEY_B}"\n') == TenantFile(KEYS)
    digest = hashlib.sha256(KEY_A.encode()).hexdigest()
    found = read(f'[a]\nkeys = "sha256:{digest}"\ntokens_per_minute = 50\n[b]\nkeys = []\n')
    assert found.rate_limits == {"a": RateLimit(tokens_per_minute=50)}
    assert TenantKeys(found.keys).tenant_of(f"Bearer {KEY_A}") == "a"
    found = with_default_keys(TenantFile({"default": (KEY_A,), "b": ()}), (KEY_B,))
    keys = TenantKeys(found.keys)
    assert {keys.tenant_of(f"Bearer {key}") for key in (KEY_A, KEY_B)} == {"default"}
    assert with_default_keys(found, ()) is found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected at least one API key, got none: the server would be open"),
        ({"default": ()}, "expected at least one API key, got none: the server would be open"),
        ({"a": (KEY_A,), "b": ()}, "expected at least one API key of tenant 'b', got none"),
    ],
)
def test_file_without_keys_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        require_keys(TenantFile(keys), Path("keys.toml"))
    require_keys(TenantFile({"a": (KEY_A,), "default": ()}), Path("keys.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "is not TOML"),
        ("a = 5", "an API key or a list"),
        ("a = [1]", "an API key or a list"),
        ("[a]\nkey = 'sk-a-2f0c77d1'", "expected keys, evict, requests_per_minute and"),
        ("[a]\ntokens_per_minute = 0", "tenant 'a': expected tokens_per_minute"),
        ("[a]\nevict = 5\n", "tenant 'a': expected evict as a string, got 5"),
    ],
)
def test_invalid_key_file_is_refused(read, tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)
    with pytest.raises(ConfigError, match="cannot read --tenant-keys"):
        read_tenant_keys(tmp_path / "none.toml")


# ---- through the server --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tenants", "expected"),
    [(B, "a;b", ("b", "mine")), ({}, "a;b;default", ("default", "mine"))],
)
def test_tenant_is_taken_from_the_key_not_the_body(
    send, llm, monkeypatch, headers, tenants, expected
):
    seen, submit = [], llm.engine.scheduler.submit
    scheduler = llm.engine.scheduler
    monkeypatch.setattr(scheduler, "submit", lambda one: (seen.append(one), submit(one))[1])
    body = {"prompt": "Once", "max_tokens": 2, "tenant": "a", "cache_salt": "mine"}
    keys = TenantKeys(KEYS, parse_tenants(tenants))

    [response] = send(("POST", COMPLETIONS, {"json": body, "headers": headers}), tenant_keys=keys)
    assert response.status_code == 200
    assert [(request.tenant, request.spec.cache_salt) for request in seen] == [expected]


# ---- host names of a local server: no access by DNS rebinding ------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "192.168.0.7", "localhost.evil.example", "[", ""]
)
def test_local_server_without_keys_refuses_other_host_names(get, host):
    assert get("/health", {"host": host}).status_code == 403
    response = get("/v1/models", {"host": host})

    assert response.status_code == 403
    message = response.json()["error"]["message"]
    assert message.startswith("expected localhost or a loopback address in the header Host, got")
    assert f"'{host}'" in message
    assert "--api-key" in message


LOCAL = ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.0.1", "[::1]:8", "a.localhost")


def test_local_server_accepts_its_names_and_one_with_keys_or_another_address_every_name(get):
    assert {get("/v1/models", {"host": host}).status_code for host in LOCAL} == {200}
    other = {"host": "chat.example"}
    assert get("/v1/models", A | other, tenant_keys=TenantKeys(KEYS)).status_code == 200
    assert get("/v1/models", other, host="0.0.0.0").status_code == 200


# ---- access without a key, and the cost of huge bodies -------------------------------------------

BODIES = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 1},
    CHATS: {"messages": [USER], "max_tokens": 1},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5]},
}


def test_every_path_except_the_probes_needs_a_key(send, llm):
    paths = create_app(llm).openapi()["paths"]
    assert set(paths) >= OPEN_PATHS
    calls = [(method, path) for path, methods in paths.items() for method in methods]
    calls += [("get", path) for path in ("/redoc", "/v2/new", "/health/")]
    assert len(calls) > 12

    responses = send(
        *((method, path, {"json": BODIES.get(path)}) for method, path in calls),
        tenant_keys=TenantKeys(KEYS),
    )

    for (_, path), response in zip(calls, responses, strict=True):
        if path in OPEN_PATHS:
            assert response.status_code == 200
            continue
        assert response.status_code == 401
        assert "missing API key" in response.json()["error"]["message"], path
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{}, bearer("sk-unknown-000"), A])
def test_probes_need_no_key_and_other_paths_accept_a_valid_one(send, headers):
    paths = [*OPEN_PATHS]
    calls = [("GET", path, {"headers": headers}) for path in paths]
    if headers is A:
        paths += ["/v1/models", "/version", "/v1/kv/ledger", "/v1/kv/events"]
        calls = [("GET", path, {"headers": A}) for path in paths]
        calls += [("POST", path, {"headers": A, "json": body}) for path, body in BODIES.items()]

    responses = send(*calls, tenant_keys=TenantKeys(KEYS))
    assert [response.status_code for response in responses] == [200] * len(calls)


def test_websockets_need_a_key_and_bodies_without_one_are_not_read(send):
    app = FastAPI()

    @app.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(socket.state.tenant)

    guarded = TestClient(KeyGuard(app, TenantKeys(KEYS)))

    with guarded.websocket_connect("/live", headers=A) as socket:
        assert socket.receive_text() == "a"
    with pytest.raises(WebSocketDisconnect) as refused, guarded.websocket_connect("/live"):
        pass
    assert refused.value.code == 1008

    read = []

    async def body():
        for _ in range(1_000):
            read.append(1)
            yield b"x" * 10_000

    call = ("POST", "/tokenize", {"content": body(), "headers": JSON})
    error_of(send(call, tenant_keys=TenantKeys(KEYS))[0], 401)
    assert len(read) < 3


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_is_refused_before_it_is_read_completely(send, path, chunked):
    read = []

    async def parts():
        for _ in range(50):
            read.append(1)
            yield b" " * 10_000

    content = parts() if chunked else b" " * 500_000
    [response] = send(("POST", path, {"content": content, "headers": JSON}), max_body="100kB")

    error = error_of(response, 413)
    assert error["type"] == "ContentTooLargeError"
    assert "larger than 100,000 B" in error["message"]
    assert "--max-body" in error["message"]
    assert len(read) <= 12


def test_body_of_exactly_the_limit_is_accepted(send):
    body = json.dumps({"prompt": "Once", "max_tokens": 1})
    calls = [
        ("POST", COMPLETIONS, {"content": text, "headers": JSON}) for text in (body, body + " ")
    ]
    assert [response.status_code for response in send(*calls, max_body=len(body))] == [200, 413]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "Once "}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "Once "]}, "prompt"),
        ("/tokenize", {"prompt": "Once "}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "Once "}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Once "}]}, "messages"),
    ],
)
def test_too_long_text_is_not_tokenized(serve, llm, monkeypatch, path, body, param):
    long = json.loads(json.dumps(body).replace("Once ", "Once " * 20_000))
    tokenized, tokenizer = [], type(llm.model.tokenizer)
    encode = tokenizer.__call__

    def recorded(self, text, **options):
        tokenized.append(len(text))
        return encode(self, text, **options)

    async def main(client):
        monkeypatch.setattr(tokenizer, "__call__", recorded)
        return await client.post(path, json=long)

    error = error_of(serve(main), 400)
    assert error["param"] == param
    assert "characters, which are at least" in error["message"]
    assert "513 tokens" in error["message"]
    assert max(tokenized, default=0) < 100


def test_too_many_token_ids_are_not_decoded_and_texts_up_to_the_context_are(
    post, serve, llm, monkeypatch
):
    assert post("/tokenize", prompt=" particular" * 512).json()["count"] == 512
    options = {"max_tokens": 1, "evict": "recent:cap=64,positions=cache"}
    response = post(COMPLETIONS, prompt="Once upon a time " * 1_000, **options)
    assert response.status_code in (200, 400)
    assert "characters, at least" not in response.text

    decoded = []

    async def main(client):
        tokenizer = type(llm.model.tokenizer)
        monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: decoded.append(1) or "")
        echoed = {"prompt": [5] * 5_000, "echo": True}
        detokenized = await client.post("/detokenize", json={"tokens": [5] * 514})
        return detokenized, await client.post(COMPLETIONS, json=echoed)

    detokenized, completed = serve(main)
    assert error_of(detokenized, 400)["param"] == "tokens"
    assert "5000 tokens" in error_of(completed, 400)["message"]
    assert not decoded


def test_long_text_of_a_tenant_does_not_block_another_tenant(serve, llm, monkeypatch):
    started, release = asyncio.Event(), asyncio.Event()

    async def main(client):
        loop = asyncio.get_running_loop()

        def slow(tokenizer, text, **options):
            if text.startswith("slow"):
                loop.call_soon_threadsafe(started.set)
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            return llm.encode(text)

        monkeypatch.setattr("quire.serve.text.encode_prompt", slow)
        long = {"json": {"prompt": "slow"}, "headers": A}
        tasks = [asyncio.create_task(client.post("/tokenize", **long)) for _ in range(5)]
        await started.wait()
        quick = await client.post("/tokenize", json={"prompt": "quick"}, headers=B)
        assert not any(task.done() for task in tasks)
        release.set()
        return [quick, *await asyncio.gather(*tasks)]

    responses = serve(main, tenant_keys=TenantKeys(KEYS))
    assert [response.status_code for response in responses] == [200] * 6


def test_freed_memory_is_returned_after_a_large_body(serve, monkeypatch):
    returned = []
    monkeypatch.setattr("quire.serve.connection.return_freed_memory", lambda: returned.append(1))

    async def main(client):
        await client.post("/tokenize", json={"prompt": "small"})
        small = len(returned)
        await client.post("/tokenize", json={"prompt": "x" * 2_000_000})
        return small, len(returned)

    assert serve(main) == (0, 1)


# ---- isolation of tenants ------------------------------------------------------------------------

LONG = f"{PROMPT} there was a king who had three sons and a daughter. " * 4
METRICS_KEY = "sk-m-77e1-secret"
PATHS = ("completions", "chat/completions", "responses")


def body_of(path, text):
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    messages = [{"role": "user", "content": text}]
    prompts = {"completions": {"prompt": text}, "responses": {"input": text}}
    return prompts.get(path, {"messages": messages}) | {limit: 2}


def cached_tokens(response):
    usage = ok(response)["usage"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("salt", [None, "shared"])
def test_prefix_of_a_tenant_is_no_hit_of_another_tenant(serve, llm, path, salt):
    body = body_of(path, f"{path} {salt} {LONG}") | ({} if salt is None else {"cache_salt": salt})
    computed = []

    async def main(client):
        hits = []
        for headers in (A, A, B, B):
            before = llm.engine.num_processed_tokens
            hits.append(cached_tokens(await client.post(f"/v1/{path}", json=body, headers=headers)))
            computed.append(llm.engine.num_processed_tokens - before)
        return hits

    first, repeated, other, other_repeated = serve(main, tenant_keys=TenantKeys(KEYS))
    assert (first, other) == (0, 0)
    assert repeated == other_repeated > 0
    # the time to first token follows the computed tokens: the other tenant computes its own prompt
    assert computed[0] == computed[2] > computed[1] == computed[3]


def secrets_in(text):
    return [key for key in (KEY_A, KEY_B, METRICS_KEY) if key in text]


def test_keys_and_prompts_are_not_logged_in_the_process(send, caplog):
    caplog.set_level(logging.DEBUG)
    secret, calls = "the password of the vault is 4711", []
    for headers in (A, B, bearer(METRICS_KEY), {"x-api-key": KEY_A}):
        for path in PATHS:
            body = body_of(path, secret)
            calls.append(("POST", f"/v1/{path}", {"json": body, "headers": headers}))
            wrong = {"json": {"prompt": 5}, "headers": headers}
            calls.append(("POST", f"/v1/{path}?key={KEY_A}", wrong))
        calls.append(("GET", "/metrics", {"headers": headers}))

    send(*calls, tenant_keys=TenantKeys(KEYS), metrics_key=METRICS_KEY)

    records = [r for r in caplog.records if r.name.startswith(("quire", "uvicorn"))]
    text = "\n".join(record.getMessage() + str(record.args) for record in records)
    assert "POST /v1/completions" in text
    assert [*secrets_in(text), *(secret,) * (secret in text)] == []


@pytest.mark.slow
def test_keys_are_not_in_the_output_of_the_process(tmp_path):
    keys, log = tmp_path / "keys.toml", tmp_path / "log"
    keys.write_text(f'a = "{KEY_A}"\nb = "{KEY_B}"\n')
    options = ("--tenant-keys", str(keys), "--metrics-key", METRICS_KEY, "--log-level", "debug")
    with log.open("w") as stderr, server_process(*options, stderr=stderr) as (process, url):
        for headers in (A, B, bearer("sk-wrong-00000000")):
            body = body_of("completions", "the password of the vault is 4711")
            httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            httpx.post(f"{url}/v1/completions?key={KEY_A}", content=b"{", headers=headers)
            httpx.get(f"{url}/metrics", headers=headers)
        process.terminate()
        written = process.stdout.read() + log.read_text()

    assert "POST /v1/completions 200" in written
    assert [*secrets_in(written), *(t for t in ("sk-wrong", "4711") if t in written)] == []

    keys.write_text(f'a = "{KEY_A}"\nb = "{KEY_A}"\n')
    command = [sys.executable, "-m", "quire", "serve", "quire-tiny", "--tenant-keys", str(keys)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "have the same" in done.stderr
    assert secrets_in(done.stdout + done.stderr) == []


# ---- rate limits ---------------------------------------------------------------------------------


BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def limits_of(clock=None, **limits):
    return RateLimits(RateLimit(**limits), clock=clock or Clock())


def test_tenants_have_separate_bounded_buckets_if_limits_are_set(monkeypatch):
    assert limits_of().charge("a", requests=10**6, tokens=10**9).headers == {}

    own = {"b": RateLimit(requests_per_minute=2)}
    limits = RateLimits(RateLimit(requests_per_minute=1), own, Clock())
    limits.charge("a", requests=1, tokens=0)
    limits.charge("b", requests=2, tokens=0)

    for tenant in ("a", "b"):
        with pytest.raises(RateLimited):
            limits.charge(tenant, requests=1, tokens=0)

    monkeypatch.setattr(rate_limits, "MAX_TENANTS", 4)
    limits = limits_of(requests_per_minute=1)
    for number in range(100):
        limits.charge(f"t{number}", requests=1, tokens=0)
    assert len(limits._buckets) <= 8


def remaining(headers):
    """The requests and tokens that are left."""
    return tuple(headers.get(f"x-ratelimit-remaining-{kind}") for kind in ("requests", "tokens"))


def test_bucket_refills_continuously():
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=2)
    for _ in range(2):
        limits.charge("a", requests=1, tokens=5)
    with pytest.raises(RateLimited, match="2 requests per minute, of which 0 are left") as refused:
        limits.charge("a", requests=1, tokens=5)
    assert refused.value.retry_after_s == pytest.approx(30)
    assert refused.value.headers["Retry-After"] == "30"

    clock.now_s += 30
    limits.charge("a", requests=1, tokens=5)


def test_refused_request_is_not_charged_and_unused_charges_are_returned_once():
    limits = limits_of(requests_per_minute=5, tokens_per_minute=100)
    limits.charge("a", requests=1, tokens=90)
    with pytest.raises(RateLimited, match="tokens per minute, of which 10 are left"):
        limits.charge("a", requests=1, tokens=20)

    headers = limits.charge("a", requests=1, tokens=10).headers
    assert remaining(headers) == ("3", "0")
    assert headers["x-ratelimit-reset-tokens"] == "1m0s"
    limits = limits_of(tokens_per_minute=100)
    charge = limits.charge("a", requests=1, tokens=100)
    charge.settle(40)
    charge.settle(0)
    assert remaining(limits.charge("a", requests=1, tokens=60).headers) == (None, "0")

    limits = limits_of(requests_per_minute=2, tokens_per_minute=100)
    charge = limits.charge("a", requests=2, tokens=100)
    charge.refund()
    charge.refund()
    charge.settle(0)
    assert remaining(limits.charge("a", requests=1, tokens=60).headers) == ("1", "40")


@pytest.mark.parametrize(("requests", "tokens", "param"), [(3, 1, "prompt"), (1, 11, "max_tokens")])
def test_more_than_a_minute_is_an_invalid_request(requests, tokens, param):
    limits = limits_of(requests_per_minute=2, tokens_per_minute=10)
    with pytest.raises(RequestError, match="the rate limit is") as refused:
        limits.charge("a", requests=requests, tokens=tokens)
    assert refused.value.param == param


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60), st.integers(0, 60)), max_size=60))
def test_a_tenant_never_gets_more_than_the_limit_and_one_burst(steps):
    clock = Clock()
    limits, limit, used = limits_of(clock, tokens_per_minute=60), 60, 0
    for pause_s, tokens, really_used in steps:
        clock.now_s += pause_s
        try:
            charge = limits.charge("a", requests=1, tokens=tokens)
        except RateLimited:
            continue
        charge.settle(min(tokens, really_used))
        used += min(tokens, really_used)
    assert used <= limit + limit * (clock.now_s - 100) / 60 + 1e-6


def test_invalid_limits_are_refused_and_durations_have_the_format_of_openai():
    init = inspect.unwrap(RateLimit.__init__)  # values of a file have any type
    for value in (0, -1, True, 1.5, "5", 10**13):
        with pytest.raises(ConfigError, match="requests_per_minute"):
            init(RateLimit.__new__(RateLimit), requests_per_minute=value)
    for seconds, text in ((0.0004, "1ms"), (0.5, "500ms"), (7.46, "7.5s"), (90.0, "1m30s")):
        assert rate_limits._duration(seconds) == text


POSTED = ("POST", COMPLETIONS, {"json": BODY})


def test_server_refuses_with_429_and_limits_the_tenant_of_the_key(send):
    first, second, third = send(POSTED, POSTED, POSTED, requests_per_minute=2)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert remaining(second.headers) == ("0", None)
    assert error_of(third, 429)["type"] == "RateLimitError"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    keys = TenantKeys({"a": (KEY_A,), "b": (KEY_B,)})
    headers = [{"headers": {"authorization": f"Bearer {key}"}} for key in (KEY_A, KEY_A, KEY_B)]
    calls = [("POST", COMPLETIONS, {"json": BODY} | each) for each in headers]
    responses = send(*calls, tenant_keys=keys, requests_per_minute=1)
    assert [response.status_code for response in responses] == [200, 429, 200]


@pytest.mark.parametrize(
    ("options", "status", "left"),
    [
        # the request uses its prompt and one token
        ({"max_tokens": 50, "allowed_token_ids": [9], "stop_token_ids": [9]}, 200, 100 - 5 - 10),
        ({"prompt": [10**6] * 4}, 400, 90),
        ({"stream": True}, 200, 80),
    ],
)
def test_server_returns_tokens_that_were_not_generated(send, options, status, left):
    call = ("POST", COMPLETIONS, {"json": BODY | options})
    first, response = send(call, POSTED, tokens_per_minute=100)
    assert first.status_code == status
    assert left <= int(remaining(response.headers)[1]) < left + 30  # the bucket refills
    if status == 200:
        assert first.headers["x-ratelimit-limit-tokens"] == "100"


def test_estimates_are_lowered_to_the_limit_and_charged_at_the_end(send):
    limits = limits_of(Clock(), tokens_per_minute=60)
    limits.charge("a", requests=1, tokens=300, min_tokens=11).settle(90)

    with pytest.raises(RateLimited) as refused:
        limits.charge("a", requests=1, tokens=30)
    assert refused.value.retry_after_s == pytest.approx(60)
    with pytest.raises(RequestError, match="needs 61 tokens"):
        limits.charge("a", requests=1, tokens=300, min_tokens=61)
    chat = {"messages": [{"role": "user", "content": "Once"}], "temperature": 0}
    first, second = send(*[("POST", CHATS, {"json": chat})] * 2, tokens_per_minute=100)
    used = ok(first)["usage"]["total_tokens"]
    assert remaining(first.headers) == (None, "0")
    assert second.status_code == (429 if used > 100 else 200)


def test_request_that_a_full_queue_refuses_is_not_charged(serve):
    long = BODY | {"max_tokens": 300}

    async def main(client):
        many = [client.post(COMPLETIONS, json=long) for _ in range(40)]
        statuses = [response.status_code for response in await asyncio.gather(*many)]
        return statuses, (await client.post(COMPLETIONS, json=BODY)).headers

    statuses, headers = serve(main, requests_per_minute=100, max_num_queued_reqs=1)
    assert 503 in statuses
    assert int(remaining(headers)[0]) >= 100 - statuses.count(200) - 1
