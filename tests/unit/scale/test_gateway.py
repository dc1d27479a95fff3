"""The gateway with replicas in this process; a replica against the server's application."""

import asyncio
import json
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import EngineDead
from quire.scale.autoscaling import KV_USED
from quire.scale.http_call import REPLICA_HEADER, HttpCall, HttpPart, respond
from quire.scale.recipe import EngineRecipe
from quire.scale.replica_choice import RECEIVED, REPORT
from quire.scale.serve.gateway import LABEL, Gateway, guarded, merged_metrics
from quire.scale.serve.recipe import ServeRecipe
from quire.scale.serve.replica import EngineReplica
from quire.serve.embedded import ReplicaLost
from quire.serve.tenant_keys import TenantKeys
from support.disconnecting import DisconnectingClient, until
from support.loggers import same_loggers

STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON = ((b"content-type", b"application/json"),)
KEY_A, KEY_B = "sk-a-00000000", "sk-b-00000000"
COMMENT = b": keep-alive\n\n"


class Lost(Exception):
    """A replica of a test ends here."""


class FakeReplicas:
    """Replicas that follow a script: for each attempt its parts; `Lost` ends the replica."""

    def __init__(self, *attempts):
        self._attempts = list(attempts)
        self.calls = []
        self.num_closed = 0

    async def forward(self, call):
        self.calls.append(call)
        script = self._attempts[min(len(self.calls), len(self._attempts)) - 1]
        try:
            for step in script:
                if step is Lost:
                    raise ReplicaLost("the replica has ended")
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                yield step
        finally:
            self.num_closed += 1

    async def ask_all(self, call):
        self.calls.append(call)
        found = self._attempts[0]
        if Lost in found:
            raise ReplicaLost("no replica is running")
        return found


def first(body, *, status=200, headers=STREAM, is_last=False):
    return HttpPart(body=body, is_last=is_last, status=status, headers=headers)


def event(text):
    return HttpPart(body=f"data: {text}\n\n".encode(), is_last=False)


END = HttpPart(body=b"", is_last=True)


def post(replicas, path="/v1/completions", body=None, *, keys=None, headers=(), retries=2):
    client = DisconnectingClient(path, {"prompt": "a"} if body is None else body)
    client.scope["headers"] += list(headers)
    gateway = Gateway(replicas, keys or TenantKeys(), retries=retries, block_words=4)
    running = guarded(gateway, 1 << 20)(client.scope, client.receive, client.send)
    asyncio.run(asyncio.wait_for(running, 10))
    start, *parts = client.sent
    assert not parts[-1].get("more_body")
    assert all(part["more_body"] for part in parts[:-1])
    return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def test_responses_pass_unchanged_and_attempts_without_output_are_repeated():
    whole = first(b'{"id": 1}', status=201, headers=(*JSON, (b"x-a", b"1")), is_last=True)
    status, headers, body = post(FakeReplicas([whole]))
    assert (status, headers[b"x-a"], body) == (201, b"1", b'{"id": 1}')
    begun = [first(COMMENT), HttpPart(body=COMMENT, is_last=False), Lost]
    replicas = FakeReplicas(begun, [first(b"data: a\n\n"), END])

    status, _, body = post(replicas)
    assert (status, body) == (200, COMMENT + COMMENT + b"data: a\n\n")

    replicas = FakeReplicas([Lost], [Lost], [first(b"data: a\n\n"), END])

    status, _, body = post(replicas)

    assert (status, body) == (200, b"data: a\n\n")
    ids = {call.header(b"x-request-id") for call in replicas.calls}
    assert len(replicas.calls) == 3
    assert len(ids) == 1

    refusal = first(b'{"error": {}}', status=503, headers=JSON, is_last=True)
    replicas = FakeReplicas([first(COMMENT), Lost], [refusal])

    status, _, body = post(replicas)

    assert status == 200
    assert len(replicas.calls) == 2
    assert b"refused with status 503" in body
    assert body.endswith(b"data: [DONE]\n\n")

    replicas = FakeReplicas([Lost])

    status, headers, body = post(replicas, retries=2)

    assert (status, headers[b"content-type"]) == (503, b"application/json")
    assert json.loads(body)["error"]["message"] == "the replica has ended"
    assert len(replicas.calls) == 3
    with pytest.raises(ReplicaLost):  # a response other than a stream that has begun
        post(FakeReplicas([first(b"{", headers=JSON), Lost]))


@pytest.mark.parametrize(
    ("path", "named"),
    [("completions", False), ("chat/completions", False), ("messages", True), ("responses", True)],
)
def test_a_stream_with_output_ends_with_an_error_event(path, named):
    replicas = FakeReplicas([first(b"data: a\n\n"), event("b"), Lost], [first(b"x"), END])

    status, _, body = post(replicas, f"/v1/{path}")

    assert status == 200
    assert len(replicas.calls) == 1
    assert body.startswith(b"data: a\n\ndata: b\n\n")
    last = body.removeprefix(b"data: a\n\ndata: b\n\n").decode()
    assert "the replica has ended" in last
    if named:
        name, data = last.strip().split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["type"] == "error"
    else:
        error, done, _ = last.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"


def test_clients_that_disconnect_cancel_what_the_router_has_learned():
    async def main():
        waits = asyncio.Event()
        replicas = FakeReplicas([first(b"data: a\n\n"), waits])
        client = DisconnectingClient("/v1/completions", {"prompt": "a"})
        gateway = Gateway(replicas, TenantKeys(), retries=2, block_words=4)
        running = asyncio.create_task(gateway(client.scope, client.receive, client.send))
        await until(lambda: len(client.sent) == 2)
        client.disconnect.set()
        await asyncio.wait_for(running, 10)
        return replicas

    replicas = asyncio.run(main())

    assert (len(replicas.calls), replicas.num_closed) == (1, 1)

    keys = TenantKeys({"a": (KEY_A,), "b": (KEY_B,)})
    replicas = FakeReplicas([first(b"{}", headers=JSON, is_last=True)])
    headers = [(b"authorization", f"Bearer {KEY_B}".encode()), (b"x-session-id", b"s1")]
    headers.append((REPLICA_HEADER, b"r7"))

    post(replicas, body={"prompt": "0123456789abcdef" * 4}, keys=keys, headers=headers)

    [call] = replicas.calls
    assert (call.routed.tenant, call.routed.session, call.replica_id) == ("b", "s1", "r7")
    assert (len(call.routed.prompt_blocks), call.routed.prompt_tokens) == (4, 16)


def test_the_body_of_an_unknown_key_is_not_read_and_a_large_one_refused():
    replicas = FakeReplicas([first(b"{}", status=401, headers=JSON, is_last=True)])
    headers = [(b"authorization", b"Bearer sk-unknown"), (b"content-length", b"15")]

    status, _, _ = post(replicas, keys=TenantKeys({"a": (KEY_A,)}), headers=headers)

    [call] = replicas.calls
    assert status == 401
    assert (call.body, call.header(b"content-length"), call.routed) == (b"", None, None)
    replicas = FakeReplicas([END])
    status, _, body = post(replicas, body={"prompt": "a" * (2 << 20)})
    assert (status, replicas.calls) == (413, [])
    assert b"larger than" in body


def test_metrics_of_all_replicas_are_merged():
    text = ((b"content-type", b"text/plain; version=0.0.4"), (b"content-length", b"4"))
    bodies = {"r1": b"# TYPE a gauge\na 1.0\n", "r2": b"# TYPE a gauge\na 2.0\n"}
    parts = [(name, first(b, headers=text, is_last=True)) for name, b in bodies.items()]
    replicas = FakeReplicas(parts)
    wanted = b'# TYPE a gauge\na{replica="r1"} 1.0\na{replica="r2"} 2.0\n'
    accept = [(b"accept", b"application/openmetrics-text")]

    status, headers, body = post(replicas, "/metrics", headers=accept)

    assert (status, body) == (200, wanted)
    assert headers[b"content-length"] == str(len(wanted)).encode()
    assert replicas.calls[0].header(b"accept") == "text/plain"
    refusal = first(b'{"error": {}}', status=401, headers=JSON, is_last=True)
    assert post(FakeReplicas([("r1", refusal)]), "/metrics")[0] == 401
    assert post(FakeReplicas([Lost]), "/metrics")[0] == 503


def test_lifespan():
    async def main():
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        receive, send = AsyncMock(side_effect=messages), AsyncMock()
        gateway = Gateway(FakeReplicas([]), TenantKeys(), retries=0, block_words=4)
        await gateway({"type": "lifespan"}, receive, send)
        return [call.args[0]["type"] for call in send.call_args_list]

    assert asyncio.run(main()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def metrics(value, labels):
    registry = CollectorRegistry()
    Gauge("plain", "without labels", registry=registry).set(value)
    Histogram("seconds", "with buckets", registry=registry).observe(value)
    counter = Counter("requests", "with labels", ["path"], registry=registry)
    for label in labels:
        counter.labels(label).inc(value)
    return generate_latest(registry).decode()


def samples(text, **more):
    return {
        (sample.name, *sorted((sample.labels | more).items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(
    st.dictionaries(
        st.sampled_from(["r1", 'r"2', "r\\3", "r 4"]),
        st.tuples(st.integers(0, 9), st.lists(st.text(' {}",=a\n\\', max_size=4), unique=True)),
        min_size=1,
    )
)
def test_every_sample_has_its_replica(given):
    texts = {replica: metrics(*content) for replica, content in given.items()}

    merged = merged_metrics(texts)

    wanted = {}
    for replica, text in texts.items():
        wanted |= samples(text, **{LABEL: replica})
    assert samples(merged) == wanted
    names = [line.split(" ")[2] for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


# ---- a replica -----------------------------------------------------------------------------------


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


def test_closed_iterators_cancel_and_reports_count_received_requests(replica):
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
