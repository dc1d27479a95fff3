"""The KV memory through HTTP: the ledger and the event log."""

import asyncio

import pytest

from quire.config.sampling_params import SamplingParams
from quire.serve.tenant_keys import TenantKeys
from support.requests import make_request

REQUEST = make_request(request_id="r", prompt_token_ids=[1], params=SamplingParams(), tenant="red")


def get(serve, path, **options):
    return serve(lambda client: client.get(path), **options)


@pytest.fixture
def events(llm):
    """Emit three events to the engine's log; return the number of the event before them."""
    log = llm.engine.events
    start = log.num_events
    for kind in ("admitted", "chunk", "freed"):
        log.emit(kind, REQUEST, tokens=3)
    return start


def test_ledger_of_an_idle_server_sums_to_the_arena(serve, llm):
    body = get(serve, "/v1/kv/ledger").json()

    assert body["total_bytes"] == llm.engine.pool.kv.memory.total_bytes
    assert sum(body["axes"]["owner"].values()) == body["total_bytes"]
    assert body["axes"]["owner"]["requests"] == 0
    assert body == llm.ledger()


def test_events_are_listed_oldest_first(serve, events):
    body = get(serve, f"/v1/kv/events?since={events}").json()

    assert body["object"] == "list"
    assert [(e["number"] - events, e["kind"]) for e in body["data"]] == [
        (1, "admitted"),
        (2, "chunk"),
        (3, "freed"),
    ]
    assert body["data"][0] | {"time_s": 0} == {
        "number": events + 1,
        "kind": "admitted",
        "time_s": 0,
        "request_id": "r",
        "tenant": "red",
        "tokens": 3,
    }


def test_events_are_filtered_by_kind_number_and_limit(serve, events):
    def kinds(query):
        return [e["kind"] for e in get(serve, f"/v1/kv/events?{query}").json()["data"]]

    assert kinds(f"since={events}&kinds=freed,admitted") == ["admitted", "freed"]
    assert kinds(f"since={events + 2}") == ["freed"]
    assert kinds("limit=2") == ["chunk", "freed"]
    assert kinds(f"since={events + 3}") == []


def test_tenant_sees_only_its_own_events_and_requests(serve, events):
    keys = TenantKeys({"red": ("sk-red-00000000",), "blue": ("sk-blue-00000000",)})

    def get_with_key(path, key):
        headers = {"authorization": f"Bearer {key}"}
        return serve(lambda client: client.get(path, headers=headers), tenant_keys=keys)

    path = f"/v1/kv/events?since={events}"
    assert len(get_with_key(path, "sk-red-00000000").json()["data"]) == 3
    assert get_with_key(path, "sk-blue-00000000").json()["data"] == []
    assert get_with_key("/v1/kv/ledger", "sk-blue-00000000").json()["requests"] == []
    for path in ("/v1/kv/events", "/v1/kv/ledger"):
        assert get_with_key(path, "sk-unknown-000000").status_code == 401


def test_ledger_of_a_tenant_excludes_other_tenants(serve, llm):
    keys = TenantKeys({"red": ("sk-red-00000000",), "blue": ("sk-blue-00000000",)})

    async def while_red_runs(client):
        red, blue = ({"authorization": f"Bearer sk-{name}-00000000"} for name in ("red", "blue"))
        options = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
        completion = asyncio.create_task(client.post("/v1/completions", json=options, headers=red))
        own = {"requests": []}
        while not own["requests"] or not own["requests"][0]["kv_bytes"]:
            assert not completion.done()
            own = (await client.get("/v1/kv/ledger", headers=red)).json()
        other = (await client.get("/v1/kv/ledger", headers=blue)).json()
        assert (await completion).status_code == 200
        return own, other

    own, other = serve(while_red_runs, tenant_keys=keys)

    assert set(own) == set(other) == {"axes", "tenants", "requests"}
    [row] = own["requests"]
    assert own["axes"]["owner"] == {"requests": row["kv_bytes"]}
    assert sum(own["axes"]["codec"].values()) == row["kv_bytes"] > 0
    assert sum(own["axes"]["references"].values()) == row["kv_bytes"]
    assert other["requests"] == other["tenants"] == []
    assert not any(sum(axis.values()) for axis in other["axes"].values())
