"""Page map, overview, tenants and what-if plans through HTTP."""

import asyncio
import base64

import numpy as np
import pytest

from quire.cli.plan_report import PlanOptions, plan_report
from quire.layout.layout import layout_for
from quire.plan.capacity import sequence_bytes, sequence_pages
from quire.serve import service
from quire.serve.kv_endpoints import without_other_tenants
from serve.conftest import refused
from support.kv_load import BLUE, RED, read, running, two_tenants


def owners_of_cells(body):
    count = np.frombuffer(base64.b64decode(body["runs"]["count"]), "<u2")
    return np.repeat(np.frombuffer(base64.b64decode(body["runs"]["owner"]), "<u2"), count)


def test_idle_page_map_covers_the_arena(serve, llm):
    body = serve(lambda client: read(client, "pages"))

    assert body["total_bytes"] == llm.engine.pool.kv.memory.total_bytes
    assert sum(one["bytes"] for one in body["owners"]) == body["total_bytes"]
    assert len(owners_of_cells(body)) == body["num_pages"]
    assert [one["kind"] for one in body["owners"]] == ["free", "prefix_cache"]


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


def test_number_of_cells_is_bounded(serve):
    body = serve(lambda client: read(client, "pages?cells=10"))

    assert len(owners_of_cells(body)) <= 10
    assert body["pages_per_cell"] * 10 >= body["num_pages"]


def test_tenant_sees_only_its_own_pages(serve):
    async def main(client):
        async with running(client, headers=RED) as [row]:
            own = await read(client, "pages", headers=RED)
            other = await read(client, "pages", headers=BLUE)
        return row, own, other

    row, own, other = serve(main, tenant_keys=two_tenants())

    assert [one["pages"] for one in own["owners"]] == [0, 0, own["num_pages"]]
    assert own["owners"][2]["request_id"] == row["request_id"]
    assert "total_bytes" not in own
    assert other["num_pages"] == 0
    assert len(other["owners"]) == 2
    assert owners_of_cells(other).size == 0


def test_overview_counts_requests_and_tokens(serve):
    async def main(client):
        before = await read(client, "overview")
        answer = await client.post("/v1/completions", json={"prompt": "A cat", "max_tokens": 5})
        assert answer.status_code == 200
        async with running(client):
            busy = await read(client, "overview")
        return before, busy

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
    keys = two_tenants()

    async def main(client, headers=None):
        async with running(client, headers=headers):
            found = []
            while not (found and found[0]["data"][-1][1]):
                await asyncio.sleep(0.01)
                found = [await read(client, "history", headers=h) for h in (headers, BLUE)]
            return found

    [body, _] = serve(main)
    own, other = serve(lambda client: main(client, RED), tenant_keys=keys)

    for one in (body, own):
        last = dict(zip(one["columns"], one["data"][-1], strict=True))
        assert (last["num_running"], last["num_waiting"]) == (1, 0)
        assert last["requests_bytes"] > 0
        times = [row[0] for row in one["data"]]
        assert times == sorted(times)
        assert 2 <= len(times) <= service.HISTORY_POINTS
    assert not any(row[1] for row in other["data"])


def test_overview_of_a_tenant_has_only_its_own_numbers(serve):
    async def main(client):
        async with running(client, headers=RED):
            own = await read(client, "overview", headers=RED)
            other = await read(client, "overview", headers=BLUE)
        return own, other

    own, other = serve(main, tenant_keys=two_tenants())

    assert own["memory"]["requests_bytes"] > 0
    assert set(own["memory"]) == set(other["memory"]) == {"requests_bytes", "limit_bytes"}
    assert (own["num_running"], other["num_running"]) == (1, 0)
    assert other["memory"]["requests_bytes"] == other["latency"]["finished"] == 0
    assert "inspection" not in other


def test_tenants_lists_use_and_quota(serve):
    async def main(client):
        async with running(client) as [row]:
            return row, await read(client, "tenants")

    row, body = serve(main)

    [tenant] = [one for one in body["data"] if one["tenant"] == "default"]
    assert tenant["num_running"] == 1
    assert tenant["used_bytes"] >= row["kv_bytes"] > 0
    assert (tenant["guaranteed_bytes"], tenant["limit_bytes"]) == (0, None)


def test_tenant_sees_only_its_own_row_without_its_share(serve):
    async def main(client):
        async with running(client, headers=RED):
            return [await read(client, "tenants", headers=headers) for headers in (RED, BLUE)]

    red, blue = serve(main, tenant_keys=two_tenants())

    assert [one["tenant"] for one in red["data"]] == ["red"]
    assert red["data"][0]["share_bytes"] is None
    assert "red" not in [one["tenant"] for one in blue["data"]]


def test_reasons_do_not_name_other_tenants():
    event = {"kind": "preempted", "reason": "tenant blue needs memory of its share"}

    assert without_other_tenants(event, None) == event
    assert without_other_tenants(event, "blue") == event
    found = without_other_tenants(event, "red")
    assert found["reason"] == "another tenant needs memory of its share"


def test_plan_counts_the_sequences_that_fit(serve, llm):
    memory = llm.engine.pool.kv.memory

    async def main(client):
        return (
            await read(client, "plan?length=64"),
            await read(client, f"plan?length=64&budget_bytes={2 * memory.total_bytes}"),
            await read(client, "plan?length=64&retained=32"),
            await read(client, "plan?length=1000000"),
        )

    now, twice, evicting, too_long = serve(main)

    group = memory.layout.groups[0]
    each_bytes = group.num_lanes * 64 // group.page_class.tokens * group.page_class.page_bytes
    assert now["bytes_per_sequence"] == each_bytes
    assert now["sequences"] == memory.total_bytes // each_bytes
    assert twice["sequences"] == 2 * now["sequences"]
    assert each_bytes // 2 < evicting["bytes_per_sequence"] < each_bytes  # pages store positions
    assert evicting["longest_tokens"] == now["max_positions"]
    assert (too_long["sequences"], too_long["limit"]) == (0, "context")


@pytest.mark.parametrize("codec", ["none", "int8", "int4:group=32", "kivi4+sinks=4+residual=32"])
def test_plan_in_a_codec_equals_that_of_quire_plan(serve, llm, codec):
    total_bytes = llm.engine.pool.kv.memory.total_bytes
    options = {"dtype": "float32", "kv_codec": codec, "kv_memory_bytes": total_bytes}
    report = plan_report(llm.model.folder, PlanOptions(sequence_tokens=100, **options))

    written = codec.replace("+", "%2B")
    body = serve(lambda client: read(client, f"plan?length=100&codec={written}"))

    assert body["codec"] == report.kv_codec
    layout = layout_for(
        report.model, codec=report.kv_codec, page_tokens=report.capacity.page_tokens
    )
    assert body["bytes_per_sequence"] == sequence_bytes(layout, 100)
    assert report.capacity.pages_per_sequence == sum(sequence_pages(layout, 100).values())
    assert body["sequences"] == report.capacity.sequences
    assert body["longest_tokens"] == report.capacity.longest_tokens
    assert body["codecs"][0] == "float32"
    assert {"int8", "kivi4"} < set(body["codecs"])


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("pages?cells=0", "cells"),
        ("pages?cells=1000000", "cells"),
        ("pages?map=maybe", "map"),
        ("pages?cell=5", "cell"),
        ("plan?budget_bytes=1", "budget_bytes"),
        ("plan?budget_bytes=1GiB", "budget_bytes"),
        ("plan?length=0", "length"),
        ("plan?retained=-1", "retained"),
        ("plan?codec=int9", "codec"),
        ("plan?codec=float16", "codec"),
        ("plan?budget_byte=5", "budget_byte"),
        ("requests?limit=0", "limit"),
        ("requests?limit=100000", "limit"),
        ("requests/x/tokens?limit=1000000", "limit"),
        ("requests/x/tokens?first=-1", "first"),
        ("requests/x/tokens?lane=true", "lane"),
        ("prefixes?limit=0", "limit"),
        ("events/stream?since=-1", "since"),
        ("events/stream?since=soon", "since"),
        ("events/stream?kinds=none", "kinds"),
    ],
)
def test_bad_parameter_is_named(serve, path, param):
    response = serve(lambda client: client.get(f"/v1/kv/{path}"))

    refused(response, param)
    assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("kinds=admitted,nonsense", "kinds", "choose from admitted, chunk"),
        ("kinds=", "kinds", "choose from"),
        ("since=-1", "since", "since"),
        ("since=soon", "since", "since"),
        ("limit=0", "limit", "limit"),
        ("kind=freed", "kind", "did you mean `kinds`?"),
    ],
)
def test_bad_parameter_of_events_is_refused_with_its_values(serve, query, param, message):
    response = serve(lambda client: client.get(f"/v1/kv/events?{query}"))

    assert message in refused(response, param)
