"""Fixtures of the server: the packaged model is loaded once and generates few tokens."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from functools import cache

import httpx
import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.serve import text
from quire.serve.app import create_app
from quire.serve.config import ServerConfig

PATIENCE_S = 120.0
PROMPT = "<|doc|>Once upon a time"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Once upon a time"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def llm():
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="4MiB"), verify=False)


@pytest.fixture(autouse=True, scope="session")
def _one_length_bound():
    """Every application has the same tokenizer, whose bound takes 30 ms to verify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "text_length", cache(text.text_length))
        yield


@pytest.fixture
def serve(llm):
    """Run `main(client)` with a new application; fail if it hangs or leaks requests."""

    def run(main, **options):
        async def with_client():
            async with client_of(llm, **options) as client:
                return await main(client)

        result = asyncio.run(asyncio.wait_for(with_client(), PATIENCE_S))
        assert not llm.engine.has_work
        llm.engine.check()
        return result

    return run


@pytest.fixture
def send(serve):
    """Send requests to one new application, each after the last one's response.

    A request is its method, its path and options of httpx.
    """

    def run(*calls, **options):
        async def main(client):
            return [await client.request(method, path, **fields) for method, path, fields in calls]

        return serve(main, **options)

    return run


@pytest.fixture
def get(send):
    return lambda path, headers=None, **options: send(
        ("GET", path, {"headers": headers}), **options
    )[0]


@pytest.fixture
def post(send):
    def one(path, **body):
        content = json.dumps(body)  # ASCII: httpx cannot encode a lone surrogate
        return send(("POST", path, {"content": content, "headers": JSON}))[0]

    return one


@pytest.fixture
def complete(post):
    return lambda **body: ok(post(COMPLETIONS, **{"prompt": PROMPT, "max_tokens": 4} | body))


@pytest.fixture
def chat(post):
    return lambda **body: ok(post(CHATS, **{"messages": [USER], "max_tokens": 4} | body))


@pytest.fixture
def stream(post):
    """The chunks of a stream, without the [DONE] that must end it."""

    def run(path, **body):
        response = post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return run


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response, status):
    """The error of a small response; its format is checked."""
    assert response.status_code == status, response.text
    assert len(response.content) < 2_000
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    return body["error"]


def post_to(llm, path, body, headers=None, **options):
    """The response of a new application of any engine."""

    async def main():
        async with client_of(llm, **options) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def refused(response, param):
    """The message of a bad request that names a field; errors of /v1/messages have no field."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.get("param", "none") == param, error
    return error["message"]


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@asynccontextmanager
async def client_of(llm, *, tenant_keys=None, tenants=None, **options):
    """A client of an application whose lifespan has started."""
    app = create_app(llm, ServerConfig(**options), tenant_keys=tenant_keys, tenants=tenants)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
