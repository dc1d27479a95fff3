"""A replica against the server's application, called directly."""

import asyncio
import json

import pytest

from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import EngineDead
from quire.scale.autoscaling import KV_USED
from quire.scale.http_call import REPLICA_HEADER, HttpCall, respond
from quire.scale.recipe import EngineRecipe
from quire.scale.replica_choice import RECEIVED, REPORT
from quire.scale.serve.recipe import ServeRecipe
from quire.scale.serve.replica import EngineReplica
from support.loggers import same_loggers

PROMPT = "<|doc|>Once upon a time"
OPTIONS = {"dtype": "float32", "kv": KVConfig(memory="4MiB"), "verify": False}
RECIPE = ServeRecipe(engine=EngineRecipe(model="quire-tiny", options=OPTIONS, threads=1))


def call(path, body=None, *, method="POST"):
    content = b"" if body is None else json.dumps(body).encode()
    headers = ((b"content-type", b"application/json"), (b"host", b"localhost"))
    url = {"path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http"}
    return HttpCall(method=method, headers=headers, body=content, **url)


@pytest.fixture(scope="module", autouse=True)
def _loggers():
    with same_loggers():
        yield


@pytest.fixture(scope="module")
def replica(_loggers):
    made = EngineReplica(RECIPE, "r1")
    yield made
    asyncio.run(made.close())


async def parts_of(replica, request):
    return [part async for part in replica.forward(request)]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_those_of_the_application(replica, stream):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "seed": 1, "stream": stream}

    parts = asyncio.run(parts_of(replica, call("/v1/completions", body)))

    first, last = parts[0], parts[-1]
    headers = dict(first.headers)
    assert (first.status, headers[REPLICA_HEADER]) == (200, b"r1")
    assert last.is_last
    assert not any(part.is_last for part in parts[:-1])
    text = b"".join(part.body for part in parts).decode()
    if stream:
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert first.body.startswith(b"data: ")
        assert text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        assert "".join(c["choices"][0]["text"] for c in chunks) == greedy_text(replica)
    else:
        assert json.loads(text)["choices"][0]["text"] == greedy_text(replica)


def greedy_text(replica):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    _, part = asyncio.run(replica.answer(call("/v1/completions", body)))
    return json.loads(part.body)["choices"][0]["text"]


def test_a_closed_iterator_cancels_the_request(replica):
    async def main():
        body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
        stream = replica.forward(call("/v1/completions", body))
        await anext(stream)
        before = await replica.record_routing_stats()
        await stream.aclose()
        while (await replica.record_routing_stats())["running_requests"]:
            await asyncio.sleep(0.01)
        return before

    before = asyncio.run(asyncio.wait_for(main(), 30))

    assert before["running_requests"] == 1
    assert before["active_kv_bytes"] > 0


def test_reports_count_received_requests_and_errors_and_probes_pass(replica):
    async def main():
        before = await replica.record_routing_stats()
        await parts_of(replica, call("/ready", method="GET"))
        return before, await replica.record_routing_stats()

    before, after = asyncio.run(main())

    assert after[RECEIVED] - before[RECEIVED] == 1
    assert after[REPORT] > before[REPORT]
    assert after["kv_capacity_bytes"] == 4 * 2**20
    assert after["queued_requests"] == after["queued_prompt_tokens"] == 0
    assert asyncio.run(replica.record_autoscaling_stats()) == {KV_USED: 0.0}
    refused = asyncio.run(parts_of(replica, call("/v1/completions", {"prompt": 3})))
    ready = asyncio.run(parts_of(replica, call("/ready", method="GET")))
    assert (refused[0].status, len(refused)) == (400, 1)
    assert (ready[0].status, ready[0].body) == (200, b"")


def test_an_application_that_fails_raises():
    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("bug")

    async def main():
        return [part async for part in respond(fails, call("/"))]

    with pytest.raises(RuntimeError, match="bug"):
        asyncio.run(main())


def test_a_dead_engine_raises_before_the_first_output(monkeypatch):
    replica = EngineReplica(RECIPE, "r2")

    def fail(engine):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Engine, "step", fail)

    async def main():
        for body in ({"stream": True}, {}):
            with pytest.raises(EngineDead):
                await parts_of(replica, call("/v1/completions", {"prompt": PROMPT} | body))
        with pytest.raises(EngineDead):
            await replica.check_health()
        await replica.close()

    asyncio.run(main())
