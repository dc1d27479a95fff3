"""Access without a key, and the cost of huge bodies."""

import asyncio
import json

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from quire.serve.app import create_app
from quire.serve.tenant_keys import OPEN_PATHS, KeyGuard, TenantKeys

KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",), "b": ("sk-b-51d09a3e",)})
A, B = ({"Authorization": f"Bearer {key}"} for key in ("sk-a-2f0c77d1", "sk-b-51d09a3e"))
JSON = {"Content-Type": "application/json"}
BODIES = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5]},
}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert len(response.content) < 2_000
    error = response.json()["error"]
    assert error["code"] == status
    return error


def test_every_path_except_the_probes_needs_a_key(serve, llm):
    paths = create_app(llm).openapi()["paths"]
    calls = [(method, path) for path, methods in paths.items() for method in methods]
    calls += [("get", path) for path in ("/redoc", "/v2/new", "/health/")]

    async def main(client):
        bodies = {path: BODIES.get(path) for _, path in calls}
        return [await client.request(m, path, json=bodies[path]) for m, path in calls]

    responses = serve(main, tenant_keys=KEYS)

    assert len(calls) > 12
    for (_, path), response in zip(calls, responses, strict=True):
        if path in OPEN_PATHS:
            assert response.status_code == 200
            continue
        assert response.status_code == 401
        assert "missing API key" in response.json()["error"]["message"], path
        assert response.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key(serve):
    async def main(client):
        headers = [{}, {"Authorization": "Bearer sk-unknown-000"}, A]
        paths = sorted(OPEN_PATHS)
        return [(await client.get(p, headers=h)).status_code for h in headers for p in paths]

    assert serve(main, tenant_keys=KEYS) == [200] * 3 * len(OPEN_PATHS)


def test_every_open_path_has_a_route(llm):
    assert set(create_app(llm).openapi()["paths"]) >= OPEN_PATHS


def test_valid_key_is_accepted_on_every_path(serve):
    async def main(client):
        posts = [await client.post(path, json=body, headers=A) for path, body in BODIES.items()]
        gets = ("/v1/models", "/version", "/v1/kv/ledger", "/v1/kv/events")
        return [*posts, *[await client.get(path, headers=A) for path in gets]]

    for response in serve(main, tenant_keys=KEYS):
        assert response.status_code == 200, response.text


def test_websocket_needs_a_key():
    app = FastAPI()

    @app.websocket("/live")
    async def live(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(socket.state.tenant)

    guarded = TestClient(KeyGuard(app, KEYS))

    with guarded.websocket_connect("/live", headers=A) as socket:
        assert socket.receive_text() == "a"
    with pytest.raises(WebSocketDisconnect) as refused, guarded.websocket_connect("/live"):
        pass
    assert refused.value.code == 1008


def test_body_without_a_key_is_not_read(serve):
    read = []

    async def body():
        for _ in range(1_000):
            read.append(1)
            yield b"x" * 10_000

    async def main(client):
        return await client.post("/tokenize", content=body(), headers=JSON)

    error_of(serve(main, tenant_keys=KEYS), 401)
    assert len(read) < 3


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_is_refused_before_it_is_read_completely(serve, path, chunked):
    read = []

    async def parts():
        for _ in range(50):
            read.append(1)
            yield b" " * 10_000

    async def main(client):
        content = parts() if chunked else b" " * 500_000
        return await client.post(path, content=content, headers=JSON)

    error = error_of(serve(main, max_body="100kB"), 413)

    assert error["type"] == "ContentTooLargeError"
    assert "larger than 100,000 B" in error["message"]
    assert "--max-body" in error["message"]
    assert len(read) <= 12


def test_body_of_exactly_the_limit_is_accepted(serve):
    body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()

    def send(content):
        return serve(
            lambda client: client.post("/v1/completions", content=content, headers=JSON),
            max_body=len(body),
        ).status_code

    assert (send(body), send(body + b" ")) == (200, 413)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "Once "}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "Once "]}, "prompt"),
        ("/tokenize", {"prompt": "Once "}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once "}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Once "}]}, "messages"),
    ],
)
def test_too_long_text_is_not_tokenized(serve, llm, monkeypatch, path, body, param):
    long = json.loads(json.dumps(body).replace("Once ", "Once " * 20_000))
    tokenized = []
    tokenizer = type(llm.model.tokenizer)

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


def test_text_of_the_context_length_is_tokenized(serve):
    longest = " particular" * 512

    response = serve(lambda client: client.post("/tokenize", json={"prompt": longest}))

    assert response.json()["count"] == 512


def test_too_many_token_ids_are_not_decoded(serve, llm, monkeypatch):
    decoded = []

    async def main(client):
        tokenizer = type(llm.model.tokenizer)
        monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: decoded.append(1) or "")
        echoed = {"prompt": [5] * 5_000, "echo": True}
        return [
            await client.post("/detokenize", json={"tokens": [5] * 514}),
            await client.post("/v1/completions", json=echoed),
        ]

    detokenized, completed = serve(main)

    assert error_of(detokenized, 400)["param"] == "tokens"
    assert "5000 tokens" in error_of(completed, 400)["message"]
    assert not decoded


def test_request_with_cache_positions_has_no_text_limit(serve):
    body = {"prompt": "Once upon a time " * 1_000, "max_tokens": 1}
    options = {"evict": "recent:cap=64,positions=cache"}

    response = serve(lambda client: client.post("/v1/completions", json=body | options))

    assert response.status_code in (200, 400)
    assert "characters, at least" not in response.text


def test_long_text_of_a_tenant_does_not_block_another_tenant(serve, llm, monkeypatch):
    started, release = asyncio.Event(), asyncio.Event()
    texts = "quire.serve.text.encode_prompt"

    def slow(tokenizer, text, **options):
        if text.startswith("slow"):
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return llm.encode(text)

    async def main(client):
        nonlocal loop
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(texts, slow)
        slow_tasks = [
            asyncio.create_task(client.post("/tokenize", json={"prompt": "slow"}, headers=A))
            for _ in range(5)
        ]
        await started.wait()
        quick = await client.post("/tokenize", json={"prompt": "quick"}, headers=B)
        waiting = [not task.done() for task in slow_tasks]
        release.set()
        return quick, waiting, await asyncio.gather(*slow_tasks)

    loop = None
    quick, waiting, slow_responses = serve(main, tenant_keys=KEYS)

    assert quick.status_code == 200
    assert all(waiting)
    assert [response.status_code for response in slow_responses] == [200] * 5


def test_freed_memory_is_returned_after_a_large_body(serve, monkeypatch):
    returned = []
    monkeypatch.setattr("quire.serve.connection.return_freed_memory", lambda: returned.append(1))

    async def main(client):
        await client.post("/tokenize", json={"prompt": "small"})
        small = len(returned)
        await client.post("/tokenize", json={"prompt": "x" * 2_000_000})
        return small, len(returned)

    assert serve(main) == (0, 1)
