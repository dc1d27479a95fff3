import asyncio
import base64
import json

import numpy as np
import pytest

from quire.api.llm import LLM
from quire.cli.plan_report import PlanOptions, plan_report
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.inspection.requests import read_retention
from quire.layout.layout import layout_for
from quire.plan.capacity import sequence_bytes, sequence_pages
from quire.scheduler.events import KINDS, KVEvent
from quire.serve import kv_endpoints, service
from quire.serve.kv_endpoints import MAX_QUEUED, Subscription, without_other_tenants
from serve.conftest import PATIENCE_S, client_of, error_of, ok, refused
from support.disconnecting import DisconnectingClient
from support.kv_load import BLUE, RED, read, running, two_tenants
from support.requests import make_request

# ---- ledger and event log ------------------------------------------------------------------------

BY_RED = make_request("r", tenant="red")


@pytest.fixture
def events(llm):
    """Emit three events to the engine's log; return the number of the event before them."""
    log = llm.engine.events
    start = log.num_events
    for kind in ("admitted", "chunk", "freed"):
        log.emit(kind, BY_RED, tokens=3)
    return start


def test_ledger_of_an_idle_server_sums_to_the_arena(get, llm):
    body = get("/v1/kv/ledger").json()
    assert body["total_bytes"] == llm.engine.pool.kv.memory.total_bytes
    assert sum(body["axes"]["owner"].values()) == body["total_bytes"]
    assert body["axes"]["owner"]["requests"] == 0
    assert body == llm.ledger()


def test_events_are_listed_oldest_first_by_kind_number_and_limit(get, events):
    def listed(query):
        body = get(f"/v1/kv/events?{query}").json()
        assert body["object"] == "list"
        return body["data"]

    rows = listed(f"since={events}")
    numbered = [(row["number"] - events, row["kind"]) for row in rows]
    assert numbered == [(1, "admitted"), (2, "chunk"), (3, "freed")]
    fixed = {"request_id": "r", "tenant": "red", "tokens": 3, "time_s": rows[0]["time_s"]}
    assert rows[0] == {"number": events + 1, "kind": "admitted", **fixed}
    for query, kinds in (
        (f"since={events}&kinds=freed,admitted", ["admitted", "freed"]),
        (f"since={events + 2}", ["freed"]),
        ("limit=2", ["chunk", "freed"]),
        (f"since={events + 3}", []),
    ):
        assert [row["kind"] for row in listed(query)] == kinds


def test_tenant_sees_only_its_own_events_and_requests(send, events):
    path, unknown = f"/v1/kv/events?since={events}", {"authorization": "Bearer sk-unknown-000000"}
    paths = ("/v1/kv/events", "/v1/kv/ledger")
    red, blue, ledger, *refusals = send(
        *(("GET", path, {"headers": headers}) for headers in (RED, BLUE)),
        ("GET", "/v1/kv/ledger", {"headers": BLUE}),
        *(("GET", path, {"headers": unknown}) for path in paths),
        tenant_keys=two_tenants(),
    )

    assert (len(red.json()["data"]), blue.json()["data"]) == (3, [])
    assert ledger.json()["requests"] == []
    assert [response.status_code for response in refusals] == [401] * 2


# ---- page map, overview, tenants and what-if plans -----------------------------------------------


def owners_of_cells(body):
    counts, owners = (
        np.frombuffer(base64.b64decode(body["runs"][name]), "<u2") for name in ("count", "owner")
    )
    return np.repeat(owners, counts)


@pytest.fixture
def of_kv(get):
    """The body of a path under /v1/kv that must succeed."""
    return lambda path: ok(get(f"/v1/kv/{path}"))


@pytest.fixture
def of_both(serve):
    """The row of a running request of one tenant, and the bodies of paths for both tenants."""

    def run(*paths):
        async def main(client):
            async with running(client, headers=RED) as [row]:
                found = [
                    [await read(client, path, headers=h) for h in (RED, BLUE)] for path in paths
                ]
                return row, *found

        return serve(main, tenant_keys=two_tenants())

    return run


def test_idle_page_map_covers_the_arena(of_kv, llm):
    body, few = of_kv("pages"), of_kv("pages?cells=10")
    assert body["total_bytes"] == llm.engine.pool.kv.memory.total_bytes
    assert sum(one["bytes"] for one in body["owners"]) == body["total_bytes"]
    assert len(owners_of_cells(body)) == body["num_pages"]
    assert [one["kind"] for one in body["owners"]] == ["free", "prefix_cache"]
    assert len(owners_of_cells(few)) <= 10
    assert few["pages_per_cell"] * 10 >= few["num_pages"]


def test_page_map_shows_the_pages_of_running_requests(serve, llm):
    async def main(client):
        async with running(client, prompts=("Once upon a time", "A cat")) as rows:
            return rows, await read(client, "pages"), await read(client, "pages?map=false")

    rows, body, totals = serve(main)

    named = {one["request_id"]: one for one in body["owners"] if one["kind"] == "request"}
    assert set(named) == {row["request_id"] for row in rows}
    cells = owners_of_cells(body)
    for row in rows:
        one = named[row["request_id"]]
        assert np.count_nonzero(cells == one["owner"]) == one["pages"]
        assert one["bytes"] >= row["kv_bytes"] > 0
    used = sum(one["bytes"] for one in body["owners"] if one["kind"] != "free")
    assert body["states"]["exact"] == used
    assert "runs" not in totals
    [page_class] = body["page_classes"]
    assert page_class["page_tokens"] == llm.engine.pool.kv.memory.layout.groups[0].page_class.tokens


def test_tenant_sees_only_its_own_memory(of_both):
    row, (own, other), (overview, idle), (ledger, empty) = of_both("pages", "overview", "ledger")

    assert [one["pages"] for one in own["owners"]] == [0, 0, own["num_pages"]]
    assert own["owners"][2]["request_id"] == row["request_id"]
    assert "total_bytes" not in own
    assert (other["num_pages"], len(other["owners"])) == (0, 2)
    assert owners_of_cells(other).size == 0

    assert overview["memory"]["requests_bytes"] > 0
    assert set(overview["memory"]) == set(idle["memory"]) == {"requests_bytes", "limit_bytes"}
    assert (overview["num_running"], idle["num_running"]) == (1, 0)
    assert idle["memory"]["requests_bytes"] == idle["latency"]["finished"] == 0
    assert "inspection" not in idle

    assert set(ledger) == set(empty) == {"axes", "tenants", "requests"}
    [held] = [one["kv_bytes"] for one in ledger["requests"]]
    assert ledger["axes"]["owner"] == {"requests": held}
    for axis in ("codec", "references"):
        assert sum(ledger["axes"][axis].values()) == held > 0
    assert empty["requests"] == empty["tenants"] == []
    assert not any(sum(axis.values()) for axis in empty["axes"].values())


def test_overview_counts_requests_and_tokens(serve):
    async def main(client):
        before = await read(client, "overview")
        ok(await client.post("/v1/completions", json={"prompt": "A cat", "max_tokens": 5}))
        async with running(client):
            return before, await read(client, "overview")

    before, busy = serve(main)
    memory = busy["memory"]
    assert busy["num_running"] == 1
    assert memory["requests_bytes"] > 0
    parts = ("requests_bytes", "cached_bytes", "border_bytes", "free_bytes")
    assert sum(memory[part] for part in parts) == memory["total_bytes"]
    generated = [one["counters"]["generated_tokens"] for one in (before, busy)]
    assert generated[1] - generated[0] >= 5
    assert busy["latency"]["finished"] >= 1
    assert busy["latency"]["ttft_s"]["p50"] > 0
    assert busy["inspection"]["calls"] >= 1


def test_history_has_rows_from_before_the_request(serve, monkeypatch):
    monkeypatch.setattr(service, "HISTORY_INTERVAL_S", 0.01)

    async def main(client, headers=None):
        async with running(client, headers=headers):
            found = []
            while not (found and len(found[0]["data"]) > 1 and found[0]["data"][-1][1]):
                await asyncio.sleep(0.01)
                found = [await read(client, "history", headers=h) for h in (headers, BLUE)]
            return found

    body, _ = serve(main)
    own, other = serve(lambda client: main(client, RED), tenant_keys=two_tenants())
    for one in (body, own):
        last = dict(zip(one["columns"], one["data"][-1], strict=True))
        assert (last["num_running"], last["num_waiting"]) == (1, 0)
        assert last["requests_bytes"] > 0
        times = [row[0] for row in one["data"]]
        assert times == sorted(times)
        assert 2 <= len(times) <= service.HISTORY_POINTS
    assert not any(row[1] for row in other["data"])


def test_tenants_list_use_and_quota_and_name_no_others(serve, of_both):
    async def main(client):
        async with running(client) as [row]:
            return row, await read(client, "tenants")

    row, body = serve(main)
    [tenant] = [one for one in body["data"] if one["tenant"] == "default"]
    assert tenant["num_running"] == 1
    assert tenant["used_bytes"] >= row["kv_bytes"] > 0
    assert (tenant["guaranteed_bytes"], tenant["limit_bytes"]) == (0, None)

    _, (red, blue) = of_both("tenants")
    [own] = red["data"]
    assert (own["tenant"], own["share_bytes"]) == ("red", None)
    assert "red" not in [one["tenant"] for one in blue["data"]]

    event = {"kind": "preempted", "reason": "tenant blue needs memory of its share"}
    for tenant in (None, "blue"):
        assert without_other_tenants(event, tenant) == event
    reason = without_other_tenants(event, "red")["reason"]
    assert reason == "another tenant needs memory of its share"


def test_plan_counts_the_sequences_that_fit(of_kv, llm):
    memory = llm.engine.pool.kv.memory
    group = memory.layout.groups[0]
    each_bytes = group.num_lanes * 64 // group.page_class.tokens * group.page_class.page_bytes

    now, evicting, too_long = map(
        of_kv, ("plan?length=64", "plan?length=64&retained=32", "plan?length=1000000")
    )
    assert now["bytes_per_sequence"] == each_bytes
    assert now["sequences"] == memory.total_bytes // each_bytes
    twice = of_kv(f"plan?length=64&budget_bytes={2 * memory.total_bytes}")
    assert twice["sequences"] == 2 * now["sequences"]
    assert each_bytes // 2 < evicting["bytes_per_sequence"] < each_bytes  # pages store positions
    assert evicting["longest_tokens"] == now["max_positions"]
    assert (too_long["sequences"], too_long["limit"]) == (0, "context")


@pytest.mark.parametrize("codec", ["none", "int8", "int4:group=32", "kivi4+sinks=4+residual=32"])
def test_plan_in_a_codec_equals_that_of_quire_plan(of_kv, llm, codec):
    total_bytes = llm.engine.pool.kv.memory.total_bytes
    options = {"dtype": "float32", "kv_codec": codec, "kv_memory_bytes": total_bytes}
    report = plan_report(llm.model.folder, PlanOptions(sequence_tokens=100, **options))
    capacity, name = report.capacity, report.kv_codec
    layout = layout_for(report.model, codec=name, page_tokens=capacity.page_tokens)

    body = of_kv(f"plan?length=100&codec={codec.replace('+', '%2B')}")
    assert body["codec"] == name
    assert body["bytes_per_sequence"] == sequence_bytes(layout, 100)
    assert capacity.pages_per_sequence == sum(sequence_pages(layout, 100).values())
    assert body["sequences"] == capacity.sequences
    assert body["longest_tokens"] == capacity.longest_tokens
    assert body["codecs"][0] == "float32"
    assert {"int8", "kivi4"} < set(body["codecs"])


@pytest.mark.parametrize(
    ("path", "params", "message"),
    [
        ("pages", "cells=0 cells=1000000 map=maybe cell=5", ""),
        ("plan", "budget_bytes=1 budget_bytes=1GiB length=0 retained=-1 budget_byte=5", ""),
        ("plan", "codec=int9 codec=float16", ""),
        ("requests", "limit=0 limit=100000", ""),
        ("requests/x/tokens", "limit=1000000 first=-1 lane=true", ""),
        ("prefixes", "limit=0", ""),
        ("events/stream", "since=-1 since=soon kinds=none", ""),
        ("events", "kinds=admitted,nonsense", "choose from admitted, chunk"),
        ("events", "kinds=", "choose from"),
        ("events", "since=-1 since=soon", "since"),
        ("events", "limit=0", "limit"),
        ("events", "kind=freed", "did you mean `kinds`?"),
    ],
)
def test_bad_parameter_is_named(send, path, params, message):
    queries = params.split()
    for query, response in zip(
        queries, send(*(("GET", f"/v1/kv/{path}?{q}", {}) for q in queries)), strict=True
    ):
        assert message in refused(response, query.partition("=")[0])
        assert response.json()["error"]["type"] == "BadRequestError"


# ---- requests, timelines, retained tokens --------------------------------------------------------

CAP = 32


@pytest.fixture(scope="module")
def evicting():
    kv = KVConfig(memory="4MiB", evict=f"h2o:cap={CAP}")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


async def finished_completion(client, headers=None, **body):
    body = {"prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True} | body
    return ok(await client.post("/v1/completions", json=body, headers=headers))


def test_running_and_finished_requests_are_listed(serve):
    async def main(client):
        done = await finished_completion(client)
        async with running(client, prompts=("A cat", "A dog")) as rows:
            return done, rows, await read(client, "requests")

    done, rows, body = serve(main)

    assert [row["request_id"] for row in body["running"]] == [row["request_id"] for row in rows]
    assert body["num_running"] == 2
    for row in body["running"]:
        assert row["kv_bytes"] > 0
        assert row["retained_tokens"] == row["computed_tokens"] > 0
        assert (row["exact"], row["sparse"]) == (True, "off")
        assert row["finish_s"] is row["waiting"] is None
    newest = body["finished"][0]
    assert newest["request_id"].startswith(done["id"])
    assert (newest["finish_reason"], newest["output_tokens"]) == ("length", 6)
    assert newest["arrival_s"] <= newest["first_token_s"] <= newest["finish_s"] <= body["time_s"]


def test_waiting_requests_have_a_cause(serve):
    prompts = [f"{number} cats and dogs" for number in range(12)]

    async def main(client):
        async with running(client, prompts=prompts[:1]):
            body = {"prompt": prompts, "max_tokens": 400, "ignore_eos": True}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            causes = []
            while "memory" not in causes:
                assert not call.done()
                rows = (await read(client, "requests?limit=3"))["waiting"]
                causes = [row["waiting"]["cause"] for row in rows]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return rows

    rows = serve(main)
    first, second = rows[:2]
    why = first["waiting"]
    assert why["cause"] == "memory"
    assert 0 <= why["free_bytes"] < why["needed_bytes"] + why["promised_bytes"]
    assert (second["waiting"]["cause"], second["waiting"]["ahead"]) == ("queue", 1)
    assert second["waiting"]["after"] == first["request_id"]
    assert (first["state"], first["kv_bytes"]) == ("waiting", 0)
    assert len(rows) <= 3


def test_timeline_of_a_request(serve):
    async def main(client):
        done = await finished_completion(client)
        async with running(client, prompts=("A cat",)) as [row]:
            ids = (f"{done['id']}-0", row["request_id"])
            return [await read(client, f"requests/{request_id}") for request_id in ids]

    finished, open_one = serve(main)
    first, *_, last = timeline = finished["timeline"]
    kinds = [event["kind"] for event in timeline]
    assert (kinds[0], kinds[-1], len(kinds)) == ("admitted", "freed", finished["num_events"])
    assert "chunk" in kinds
    assert last["reason"] == "finished"
    assert last["kv_bytes"] > 0
    times = [event["time_s"] for event in timeline]
    assert times == sorted(times)
    assert first["waited_s"] == first["time_s"] - finished["arrival_s"] >= 0
    assert [event for event in timeline[1:] if "waited_s" in event] == []
    assert finished["codec"] == "float32"
    assert [event["kind"] for event in open_one["timeline"]][:2] == ["admitted", "chunk"]


def test_tokens_of_an_exact_request_are_retained_by_all_lanes_and_given_in_parts(serve, llm):
    async def main(client):
        async with running(client) as [row]:
            path = f"requests/{row['request_id']}/tokens"
            queries = ("lanes=true", "limit=3", "first=2&limit=2")
            return [await read(client, f"{path}?{query}") for query in queries]

    body, first, second = serve(main)
    ids = body["token_ids"]
    assert body["texts"][:4] == [llm.model.tokenizer.decode([token]) for token in ids[:4]]
    assert len(body["retained"]) == body["computed_tokens"]
    assert set(body["retained"]) == {body["num_lanes"]}
    assert len(body["lanes"]) == len(body["bitmaps"]) == body["num_lanes"]
    assert body["prompt_tokens"] < body["num_tokens"]
    assert (first["token_ids"], second["token_ids"]) == (ids[:3], ids[2:4])
    assert len(first["texts"]) == len(first["retained"]) == 3
    assert second["first"] == 2
    assert "bitmaps" not in first
    assert all(part["retained_tokens"] == part["computed_tokens"] > 3 for part in (first, second))


def test_tokens_of_an_evicting_request_match_its_lanes(evicting):
    async def main():
        prompt = "Once upon a time there was a cat. " * 6
        async with client_of(evicting) as client, running(client, prompts=(prompt,)) as [row]:
            request_id = row["request_id"]
            row = await read(client, f"requests/{request_id}")
            while not row["num_evictions"]:
                row = await read(client, f"requests/{request_id}")
            return row, await read(client, f"requests/{request_id}/tokens?lanes=true")

    row, body = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert not row["exact"]
    assert "evicted" in [event["kind"] for event in row["timeline"]]
    assert row["retained_tokens"] < row["computed_tokens"]
    computed = body["computed_tokens"]
    masks = [
        np.unpackbits(np.frombuffer(base64.b64decode(lane), np.uint8), bitorder="little")[:computed]
        for lane in body["bitmaps"]
    ]
    assert np.sum(masks, axis=0).tolist() == body["retained"]
    assert body["retained_tokens"] == round(np.mean(masks) * computed, 2) <= CAP
    assert min(body["retained"]) < body["num_lanes"]
    assert all(0 < mask.sum() <= CAP for mask in masks), [mask.sum() for mask in masks]
    assert body["retained"][-1] == body["num_lanes"]


def test_retained_tokens_equal_those_of_the_eviction_trace(evicting):
    engine, params = evicting.engine, SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = list(range(10, 90))
    request_id = engine.submit(GenerationRequest(prompt, params, record_evictions=True))
    while not engine.requests()[0].eviction.num_evictions:
        engine.step()
    last = engine.eviction_trace(request_id)[-1]
    found = read_retention(engine.pool, engine.requests()[0])

    retained = [np.flatnonzero(lane[: last.num_computed]).tolist() for lane in found.mask()]
    assert retained == [lane.tolist() for lane in last.retained]
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    "options", [{"n": 3}, {"n": 2, "max_tokens": 150, "use_beam_search": True, "temperature": 0}]
)
def test_sequences_of_a_request_have_their_own_rows(serve, options):
    async def main(client):
        async with running(client, **options):
            rows = (await read(client, "requests"))["running"]
            last = rows[-1]["request_id"].replace("#", "%23")
            return rows, await read(client, f"requests/{last}/tokens")

    rows, tokens = serve(main)
    assert len({row["request_id"] for row in rows}) == len(rows) >= 2
    assert len({row["group"] for row in rows}) == 1
    assert set(tokens["retained"]) == {tokens["num_lanes"]}


@pytest.mark.parametrize("path", ["requests/nothing", "requests/nothing/tokens"])
def test_unknown_request_gets_404(get, path):
    error = error_of(get(f"/v1/kv/{path}"), 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "request_id")


def test_tenant_sees_no_request_of_another_tenant(serve):
    async def main(client):
        done = await finished_completion(client, headers=RED)
        async with running(client, prompts=("A cat",), headers=RED) as [row]:
            ids = (f"{done['id']}-0", row["request_id"], f"{row['request_id']}/tokens")
            found = [await client.get(f"/v1/kv/requests/{one}", headers=BLUE) for one in ids]
            assert all([await read(client, f"requests/{one}", headers=RED) for one in ids])
            return found, await read(client, "requests", headers=BLUE)

    refusals, listed = serve(main, tenant_keys=two_tenants())
    assert [response.status_code for response in refusals] == [404] * 3
    assert listed["running"] == listed["waiting"] == listed["finished"] == []
    assert listed["num_running"] == listed["num_waiting"] == 0


def test_texts_are_withheld_from_a_network_without_keys(serve):
    async def main(client):
        await finished_completion(client, prompt="A secret cat. " * 8)
        async with running(client, prompts=("A secret cat",)) as [row]:
            tokens = await read(client, f"requests/{row['request_id']}/tokens")
            return tokens, await read(client, "prefixes")

    tokens, prefixes = serve(main, host="0.0.0.0")

    assert tokens["texts"] is tokens["token_ids"] is None
    assert tokens["retained"]
    assert prefixes["data"]
    assert all(chain["text"] is None for chain in prefixes["data"])
    shown, _ = serve(main, host="0.0.0.0", dashboard=True)
    assert shown["texts"]


# ---- prefixes ------------------------------------------------------------------------------------

COMMON = "Once upon a time there was a cat that lived in a house with a dog and a bird. " * 2


def test_prefixes_form_a_tree(serve, llm):
    async def main(client):
        for end in ("The cat slept all day long in the sun. ", "The dog ran to the river. "):
            await finished_completion(client, prompt=COMMON + end * 4)
        return [await read(client, f"prefixes?limit={limit}") for limit in (2000, 2)]

    found, few = serve(main)
    chains, block = found["data"], llm.engine.scheduler.sequence_memory.prefix
    texts = [one["text"] or "" for one in chains]
    root = next(i for i, text in enumerate(texts) if text.startswith("Once upon a t"))
    children = [one for one in chains if one["parent"] == root]
    assert chains[root]["start"] == 0
    assert len(children) >= 2
    assert all(one["start"] == chains[root]["tokens"] for one in children)
    assert all(one["tokens"] == one["blocks"] * block.block_tokens for one in chains)
    assert sum(one["bytes"] for one in chains) == len(block) * block.block_bytes
    assert all(one["references"] == 0 and one["idle_s"] >= 0 for one in chains)
    assert len(few["data"]) <= 2 < few["num_chains"]
    for some in (chains, few["data"]):
        assert all(one["parent"] is None or one["parent"] < i for i, one in enumerate(some))


def test_tenant_sees_only_its_own_prefixes_and_their_references(serve):
    async def main(client):
        async with running(client, prompts=(COMMON,), headers=RED):
            return [await read(client, "prefixes?limit=2000", headers=h) for h in (RED, BLUE)]

    red, blue = serve(main, tenant_keys=two_tenants())
    used = [one["idle_s"] for one in red["data"] if one["references"]]
    assert used == [None] * len(used) != []
    assert {one["tenant"] for one in red["data"]} == {"red"}
    assert red["data"][0]["text"].startswith("Once upon")
    assert blue["data"] == []
    assert blue["num_blocks"] == blue["num_left_out"] == 0


# ---- events as server-sent events ----------------------------------------------------------------


class Listener:
    """An ASGI call of the stream; `texts` are the bodies that were sent."""

    def __init__(self, app, query="", path="/v1/kv/events/stream", headers=()):
        self.status, self.texts = None, []
        self._disconnect = asyncio.Event()
        encoded = [(name.encode(), value.encode()) for name, value in dict(headers).items()]
        scope = DisconnectingClient(path, {}).scope | {"method": "GET", "headers": encoded}
        scope["query_string"] = query.encode()
        self.call = asyncio.create_task(app(scope, self._receive, self._send))

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
        lines = [line for part in self.text.split("\n\n") for line in part.split("\n")]
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    async def until(self, condition):
        while not condition(self):
            assert not self.call.done(), self.text
            await asyncio.sleep(0.005)

    async def started(self):
        await self.until(lambda listener: listener.texts)
        return self

    async def leave(self):
        self._disconnect.set()
        await self.call

    async def events_until(self, condition):
        """The events so far once their list fulfils a condition; the client leaves."""
        await self.until(lambda _: condition(self.events))
        await self.leave()
        return self.events


@pytest.fixture
def with_app(serve):
    """Run `main(app)` with a new application."""
    return lambda main, **options: serve(lambda client: main(client._transport.app), **options)


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
        await listener.events_until(lambda events: len(events) == 3)
        return listener, last

    listener, last = with_app(main)
    assert listener.status == 200
    assert [event["number"] for event in listener.events] == [last - 2, last - 1, last]
    assert f"id: {last}\ndata: " in listener.text
    assert listener.texts[0].startswith("retry: ")
    assert listener.events[0]["kind"] == "freed"


STREAM = {"accept": "text/event-stream"}


@pytest.mark.parametrize(
    "resume",
    [
        lambda number: {"headers": {"last-event-id": number}},
        lambda number: {"query": f"since={number}"},
        lambda number: {"path": "/v1/kv/events", "headers": STREAM | {"last-event-id": number}},
    ],
)
def test_stream_resumes_after_the_last_known_event(with_app, resume):
    async def main(app):
        listener = await Listener(app, **resume(str((await emit(app, 5)) - 2))).started()
        last = await emit(app)
        events = await listener.events_until(lambda events: len(events) >= 3)
        return [event["number"] - last for event in events]

    assert with_app(main) == [-2, -1, 0]


def test_stream_has_the_requested_kinds_and_comments_while_it_is_idle(with_app):
    async def main(app):
        listener = await Listener(app, "kinds=evicted,admitted").started()
        for kind in ("freed", "evicted", "chunk", "admitted"):
            await emit(app, kind=kind)
        events = await listener.events_until(lambda events: len(events) == 2)
        return [event["kind"] for event in events]

    assert with_app(main) == ["evicted", "admitted"]

    async def main(app):
        listener = await Listener(app).started()
        await listener.until(lambda found: ": keep-alive\n\n" in found.text)
        await listener.leave()

    with_app(main, sse_keep_alive_interval=0.01)


def test_tenant_receives_only_its_own_events(with_app):
    async def main(app):
        await emit(app)
        red, blue = [await Listener(app, "since=0", headers=h).started() for h in (RED, BLUE)]
        for request in (BY_RED, None, make_request("b", tenant="blue")):
            await emit(app, request=request)
        found = await blue.events_until(bool), await red.events_until(bool)
        return [{event["tenant"] for event in events} for events in found]

    assert with_app(main, tenant_keys=two_tenants()) == [{"blue"}, {"red"}]


def test_log_is_listened_to_only_while_there_are_clients(with_app, llm):
    async def main(app):
        before = len(llm.engine.events._listeners)
        one, other = await Listener(app).started(), await Listener(app).started()
        during = len(llm.engine.events._listeners)
        await one.leave()
        await other.leave()
        while len(llm.engine.events._listeners) != before:
            await asyncio.sleep(0.005)
        again = await Listener(app).started()
        await emit(app)
        await again.events_until(bool)
        return during - before

    assert with_app(main) == 1


def test_streams_end_at_shutdown_and_their_number_is_bounded(with_app, monkeypatch):
    async def main(app):
        listener = await Listener(app).started()
        app.state.service.drain()
        await listener.call
        refused = Listener(app)
        await refused.call
        return refused.status

    assert with_app(main) == 503

    monkeypatch.setattr(kv_endpoints, "MAX_STREAMS_PER_TENANT", 2)

    async def main(app):
        listeners = [await Listener(app).started() for _ in range(2)]
        refused = Listener(app)
        await refused.call
        for listener in listeners:
            await listener.leave()
        await (await Listener(app).started()).leave()
        return refused.status, refused.text

    status, text = with_app(main)
    assert status == 503
    assert "2 streams of KV events are open" in text


def test_event_is_sent_once_if_it_is_stored_and_not_yet_delivered(with_app):
    async def main(app):
        first = await Listener(app).started()
        last = await emit(app, 5)  # stored, and not delivered for `FLUSH_S`
        listeners = [first, await Listener(app, f"since={last - 3}").started()]
        listeners.append(await Listener(app).started())
        last, numbers = await emit(app), []
        for listener in listeners:
            found = await listener.events_until(lambda e: e and e[-1]["number"] == last)
            numbers.append([event["number"] - last for event in found])
        return numbers

    assert with_app(main) == [[-5, -4, -3, -2, -1, 0], [-3, -2, -1, 0], [0]]


def test_pause_between_two_clients_loses_no_events(with_app):
    async def main(app):
        listeners = []
        for _ in range(3):
            listeners.append(await Listener(app).started())
            await emit(app)
            await listeners[-1].leave()
            await emit(app, 3)
        listeners.append(await Listener(app).started())
        await emit(app)
        await listeners[-1].events_until(bool)
        return "".join(listener.text for listener in listeners)

    assert "event: lost" not in with_app(main)


def test_events_that_the_engine_drops_are_reported_to_those_who_want_them(with_app, monkeypatch):
    monkeypatch.setattr(kv_endpoints, "KEPT_EVENTS", 4)

    def work(engine):
        for request in [BY_RED] * 6 + [make_request("b", tenant="blue")] * 3:
            engine.events.emit("freed", request, kv_bytes=3)

    async def main(app):
        listeners = [await Listener(app, headers=headers).started() for headers in (RED, BLUE)]
        await app.state.service.inspect(work)
        found = [await each.events_until(lambda e: e and "number" in e[-1]) for each in listeners]
        return [[event.get("events") for event in events] for events in found]

    assert with_app(main, tenant_keys=two_tenants()) == [[5, None], [None] * 3]


# ---- queue ---------------------------------------------------------------------------------------


def subscription(*numbers):
    client = Subscription(KINDS, None, "red")
    for number in numbers:
        client.put(event(number))
    return client


def event(number):
    return KVEvent("freed", 0.0, "r", "red", {}, number)


def numbers_of(text):
    return [int(line[4:]) for line in text.split("\n") if line.startswith("id: ")]


def test_slow_client_loses_the_oldest_events_and_stored_ones_come_first():
    async def main():
        client = subscription(*range(1, MAX_QUEUED + 6))
        texts = [client.take()]
        while numbers_of(texts[-1]):
            texts.append(client.take())
        return texts

    texts = asyncio.run(main())
    assert texts[0].startswith('event: lost\ndata: {"events": 5}\n\n')
    assert numbers_of("".join(texts)) == list(range(6, MAX_QUEUED + 6))

    async def main():
        client = subscription(4, 5)
        client.start([event(2), event(3), event(4)], 4)
        return numbers_of(client.take())

    assert asyncio.run(main()) == [2, 3, 4, 5]
