"""A client that disconnects: its requests are cancelled and their KV is freed."""

import asyncio
import logging

import httpx
import pytest

from quire.serve.app import create_app
from support.disconnecting import DisconnectingClient, until

MAX_TOKENS = 400
PATIENCE_S = 120.0
BODIES = {
    "/v1/completions": {"prompt": "<|doc|>A"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_requests(llm, path, stream):
    body = BODIES[path] | {
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "n": 2,
        "stream": stream,
    }
    before = llm.engine.num_generated_tokens

    async def main():
        client = DisconnectingClient(path, body)
        app = create_app(llm)
        async with app.router.lifespan_context(app):
            call = asyncio.create_task(app(client.scope, client.receive, client.send))
            await until(lambda: llm.engine.num_generated_tokens > before + 2)
            client.disconnect.set()
            await call
            await until(lambda: not llm.engine.has_work)
        return client.sent

    sent = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    assert llm.engine.num_generated_tokens - before < MAX_TOKENS
    assert any(b"data: " in message.get("body", b"") for message in sent) == stream
    llm.engine.check()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "<|doc|>A", "max_tokens": MAX_TOKENS, "ignore_eos": True}),
        ("/v1/embeddings", {"input": [[5] * 400] * 40}),
    ],
)
def test_disconnect_before_the_response_is_logged_and_counted_as_499(llm, caplog, path, body):
    caplog.set_level(logging.INFO, logger="quire.access")

    async def main():
        client = DisconnectingClient(path, body)
        app = create_app(llm)
        async with app.router.lifespan_context(app):
            call = asyncio.create_task(app(client.scope, client.receive, client.send))
            await until(lambda: llm.engine.has_work)
            client.disconnect.set()
            await call
            await until(lambda: not llm.engine.has_work)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as other:
                return (await other.get("/metrics")).text

    metrics = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    llm.engine.check()
    [line] = [r.getMessage() for r in caplog.records if r.name == "quire.access"]
    assert line.startswith(f"POST {path} 499 in ")
    counted = [
        text for text in metrics.splitlines() if text.startswith("quire_http_requests_total")
    ]
    assert len(counted) == 1
    assert f'path="{path}"' in counted[0]
    assert 'status="499"' in counted[0]


def test_disconnect_before_the_first_event_cancels_the_request(llm):
    """Its stream is never iterated, so the stream cannot cancel the request."""
    body = {"prompt": "<|doc|>A", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    before = llm.engine.num_generated_tokens

    async def main():
        client = DisconnectingClient("/v1/completions", body)

        async def refuse(_message):
            client.disconnect.set()
            await asyncio.Event().wait()

        app = create_app(llm)
        async with app.router.lifespan_context(app):
            await app(client.scope, client.receive, refuse)
            await until(lambda: not llm.engine.has_work)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    assert llm.engine.num_generated_tokens - before < MAX_TOKENS
