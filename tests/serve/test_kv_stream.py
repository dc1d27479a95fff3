"""KV events as server-sent events."""

import asyncio
import json

import pytest

from quire.scheduler.events import KINDS, KVEvent
from quire.serve import kv_endpoints
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.kv_endpoints import MAX_QUEUED, Subscription
from support.kv_load import BLUE, RED, two_tenants
from support.requests import make_request

PATIENCE_S = 120.0
BY_RED = make_request("r", tenant="red")


class Listener:
    """An ASGI call of the stream; `texts` are the bodies that were sent."""

    def __init__(self, app, query="", path="/v1/kv/events/stream", headers=()):
        self.status, self.texts = None, []
        self._disconnect = asyncio.Event()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in dict(headers).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._call = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self):
        await self._disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.texts.append(message["body"].decode())

    @property
    def text(self):
        return "".join(self.texts)

    @property
    def events(self):
        parts = [part.split("\n") for part in self.text.split("\n\n")]
        return [
            json.loads(line.removeprefix("data: "))
            for lines in parts
            for line in lines
            if line.startswith("data: ")
        ]

    async def until(self, condition):
        while not condition(self):
            assert not self._call.done(), self.text
            await asyncio.sleep(0.005)

    async def started(self):
        await self.until(lambda listener: listener.texts)
        return self

    async def leave(self):
        self._disconnect.set()
        await self._call


@pytest.fixture
def with_app(llm):
    def run(main, *, tenant_keys=None, **options):
        async def started():
            app = create_app(llm, ServerConfig(**options), tenant_keys=tenant_keys)
            async with app.router.lifespan_context(app):
                return await main(app)

        return asyncio.run(asyncio.wait_for(started(), PATIENCE_S))

    return run


def emit(app, number=1, request=BY_RED, kind="freed"):
    """Emit events in the engine's thread."""

    def work(engine):
        for _ in range(number):
            engine.events.emit(kind, request, kv_bytes=3)
        return engine.events.num_events

    return app.state.service.inspect(work)


def test_new_events_are_streamed_with_their_numbers(with_app):
    async def main(app):
        await emit(app)
        listener = await Listener(app).started()
        last = await emit(app, 3)
        await listener.until(lambda found: len(found.events) == 3)
        await listener.leave()
        return listener, last

    listener, last = with_app(main)

    assert listener.status == 200
    assert [event["number"] for event in listener.events] == [last - 2, last - 1, last]
    assert f"id: {last}\ndata: " in listener.text
    assert listener.texts[0].startswith("retry: ")
    assert listener.events[0]["kind"] == "freed"


@pytest.mark.parametrize(
    "resume",
    [
        lambda number: {"headers": {"last-event-id": str(number)}},
        lambda number: {"query": f"since={number}"},
        lambda number: {
            "path": "/v1/kv/events",
            "headers": {"accept": "text/event-stream", "last-event-id": str(number)},
        },
    ],
)
def test_stream_resumes_after_the_last_known_event(with_app, resume):
    async def main(app):
        first = await emit(app, 5)
        listener = await Listener(app, **resume(first - 2)).started()
        last = await emit(app)
        await listener.until(lambda found: len(found.events) >= 3)
        await listener.leave()
        return [event["number"] for event in listener.events], last

    numbers, last = with_app(main)

    assert numbers == [last - 2, last - 1, last]


def test_stream_of_some_kinds(with_app):
    async def main(app):
        listener = await Listener(app, "kinds=evicted,admitted").started()
        for kind in ("freed", "evicted", "chunk", "admitted"):
            await emit(app, kind=kind)
        await listener.until(lambda found: len(found.events) == 2)
        await listener.leave()
        return [event["kind"] for event in listener.events]

    assert with_app(main) == ["evicted", "admitted"]


def test_tenant_receives_only_its_own_events(with_app):
    async def main(app):
        await emit(app)
        listeners = [
            await Listener(app, "since=0", headers=headers).started() for headers in (RED, BLUE)
        ]
        await emit(app)
        await emit(app, request=None)
        await emit(app, request=make_request("b", tenant="blue"))
        await listeners[1].until(lambda found: found.events)
        for listener in listeners:
            await listener.leave()
        return [{event["tenant"] for event in listener.events} for listener in listeners]

    assert with_app(main, tenant_keys=two_tenants()) == [{"red"}, {"blue"}]


def test_log_is_listened_to_only_while_there_are_clients(with_app, llm):
    async def main(app):
        before = llm.engine.events._listeners
        one, other = await Listener(app).started(), await Listener(app).started()
        during = len(llm.engine.events._listeners)
        await one.leave()
        await other.leave()
        while len(llm.engine.events._listeners) != len(before):
            await asyncio.sleep(0.005)
        again = await Listener(app).started()
        await emit(app)
        await again.until(lambda found: found.events)
        await again.leave()
        return during - len(before)

    assert with_app(main) == 1


def test_stream_ends_when_the_server_shuts_down(with_app):
    async def main(app):
        listener = await Listener(app).started()
        app.state.service.drain()
        await listener._call
        refused = Listener(app)
        await refused._call
        return refused.status

    assert with_app(main) == 503


def test_number_of_streams_is_bounded(with_app, monkeypatch):
    monkeypatch.setattr(kv_endpoints, "MAX_STREAMS_PER_TENANT", 2)

    async def main(app):
        listeners = [await Listener(app).started() for _ in range(2)]
        refused = Listener(app)
        await refused._call
        for listener in listeners:
            await listener.leave()
        later = await Listener(app).started()
        await later.leave()
        return refused.status, refused.text

    status, text = with_app(main)

    assert status == 503
    assert "2 streams of KV events are open" in text


def test_idle_stream_sends_comments(with_app):
    async def main(app):
        listener = await Listener(app).started()
        await listener.until(lambda found: ": keep-alive\n\n" in found.text)
        await listener.leave()

    with_app(main, sse_keep_alive_interval=0.01)


def test_event_is_sent_once_if_it_is_stored_and_not_yet_delivered(with_app):
    async def main(app):
        first = await Listener(app).started()
        last = await emit(app, 5)  # stored, and not delivered for `FLUSH_S`
        resumed = await Listener(app, f"since={last - 3}").started()
        new = await Listener(app).started()
        last = await emit(app)
        for listener in (first, resumed, new):
            await listener.until(lambda found: found.events and found.events[-1]["number"] == last)
            await listener.leave()
        return [[e["number"] - last for e in found.events] for found in (first, resumed, new)]

    assert with_app(main) == [[-5, -4, -3, -2, -1, 0], [-3, -2, -1, 0], [0]]


def test_pause_between_two_clients_loses_no_events(with_app):
    async def main(app):
        texts = []
        for _ in range(3):
            listener = await Listener(app).started()
            await emit(app)
            await listener.leave()
            await emit(app, 3)
            texts.append(listener.text)
        listener = await Listener(app).started()
        await emit(app)
        await listener.until(lambda found: found.events)
        await listener.leave()
        return "".join([*texts, listener.text])

    assert "event: lost" not in with_app(main)


def test_events_that_the_engine_drops_are_reported_to_those_who_want_them(with_app, monkeypatch):
    monkeypatch.setattr(kv_endpoints, "KEPT_EVENTS", 4)

    def work(engine):
        for request in [BY_RED] * 6 + [make_request("b", tenant="blue")] * 3:
            engine.events.emit("freed", request, kv_bytes=3)

    async def main(app):
        listeners = [await Listener(app, headers=headers).started() for headers in (RED, BLUE)]
        await app.state.service.inspect(work)
        for listener in listeners:
            await listener.until(lambda found: found.events and "number" in found.events[-1])
            await listener.leave()
        return [[event.get("events") for event in found.events] for found in listeners]

    red, blue = with_app(main, tenant_keys=two_tenants())

    assert red == [5, None]
    assert blue == [None] * 3


# ---- queue ---------------------------------------------------------------------------------------


def event(number, kind="freed", tenant="red"):
    return KVEvent(kind, 0.0, "r", tenant, {}, number)


def numbers_of(text):
    return [int(line[4:]) for line in text.split("\n") if line.startswith("id: ")]


def test_slow_client_loses_the_oldest_events_and_is_told():
    async def main():
        client = Subscription(KINDS, None, "red")
        for number in range(1, MAX_QUEUED + 6):
            client.put(event(number))
        texts = [client.take()]
        while numbers_of(texts[-1]):
            texts.append(client.take())
        return texts

    texts = asyncio.run(main())

    assert texts[0].startswith('event: lost\ndata: {"events": 5}\n\n')
    found = [number for text in texts for number in numbers_of(text)]
    assert found == list(range(6, MAX_QUEUED + 6))


def test_stored_events_come_before_queued_ones_without_repetition():
    async def main():
        client = Subscription(KINDS, None, "red")
        for number in (4, 5):
            client.put(event(number))
        client.start([event(2), event(3), event(4)], 4)
        return numbers_of(client.take())

    assert asyncio.run(main()) == [2, 3, 4, 5]
