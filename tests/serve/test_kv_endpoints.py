"""The KV memory through HTTP: who holds it, and what has happened to it."""

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
    """The log of the server's engine; what a test adds can be found behind `start`."""
    log = llm.engine.events
    start = log.num_events
    for kind in ("admitted", "chunk", "freed"):
        log.emit(kind, REQUEST, tokens=3)
    return start


def test_the_ledger_of_an_idle_server_adds_up_to_the_arena(serve, llm):
    body = get(serve, "/v1/kv/ledger").json()

    assert body["total_bytes"] == llm.engine.pool.kv.memory.total_bytes
    assert sum(body["axes"]["owner"].values()) == body["total_bytes"]
    assert body["axes"]["owner"]["requests"] == 0
    assert body == llm.ledger()


def test_the_ledger_shows_who_is_being_answered(serve):
    async def while_answering(client):
        options = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=options))
        body = {"axes": {"owner": {"requests": 0}}}
        while not body["axes"]["owner"]["requests"]:
            assert not answer.done()
            body = (await client.get("/v1/kv/ledger")).json()
        await answer
        return body

    body = serve(while_answering)

    [row] = body["requests"]
    assert row["tenant"] == "default"
    assert row["state"] == "running"
    assert 0 < row["kv_bytes"] == body["axes"]["owner"]["requests"]
    assert body["tenants"][0]["kv_bytes"] == row["kv_bytes"]


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


def test_events_are_chosen_by_kind_number_and_count(serve, events):
    def kinds(query):
        return [e["kind"] for e in get(serve, f"/v1/kv/events?{query}").json()["data"]]

    assert kinds(f"since={events}&kinds=freed,admitted") == ["admitted", "freed"]
    assert kinds(f"since={events + 2}") == ["freed"]
    assert kinds("limit=2") == ["chunk", "freed"]
    assert kinds(f"since={events + 3}") == []


def test_a_tenant_with_a_key_sees_its_own_and_a_stranger_nothing(serve, events):
    keys = TenantKeys({"red": ("sk-red-00000000",), "blue": ("sk-blue-00000000",)})

    def ask(path, key):
        headers = {"authorization": f"Bearer {key}"}
        return serve(lambda client: client.get(path, headers=headers), tenant_keys=keys)

    path = f"/v1/kv/events?since={events}"
    assert len(ask(path, "sk-red-00000000").json()["data"]) == 3
    assert ask(path, "sk-blue-00000000").json()["data"] == []
    assert ask("/v1/kv/ledger", "sk-blue-00000000").json()["requests"] == []
    for path in ("/v1/kv/events", "/v1/kv/ledger"):
        assert ask(path, "sk-nobody-000000").status_code == 401


def test_a_tenant_with_a_key_sees_no_sums_over_others(serve, llm):
    keys = TenantKeys({"red": ("sk-red-00000000",), "blue": ("sk-blue-00000000",)})

    async def while_red_is_answered(client):
        red, blue = ({"authorization": f"Bearer sk-{name}-00000000"} for name in ("red", "blue"))
        options = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=options, headers=red))
        own = {"requests": []}
        while not own["requests"] or not own["requests"][0]["kv_bytes"]:
            assert not answer.done()
            own = (await client.get("/v1/kv/ledger", headers=red)).json()
        other = (await client.get("/v1/kv/ledger", headers=blue)).json()
        assert (await answer).status_code == 200
        return own, other

    own, other = serve(while_red_is_answered, tenant_keys=keys)

    assert set(own) == set(other) == {"axes", "tenants", "requests"}
    [row] = own["requests"]
    assert own["axes"]["owner"] == {"requests": row["kv_bytes"]}
    assert sum(own["axes"]["codec"].values()) == row["kv_bytes"] > 0
    assert sum(own["axes"]["references"].values()) == row["kv_bytes"]
    assert other["requests"] == other["tenants"] == []
    assert not any(sum(axis.values()) for axis in other["axes"].values())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("kinds=admitted,nonsense", "choose from admitted, chunk"),
        ("kinds=", "choose from"),
        ("since=-1", "since"),
        ("since=soon", "since"),
        ("limit=0", "limit"),
        ("kind=freed", "did you mean `kinds`?"),
    ],
)
def test_a_wrong_question_is_refused_in_openais_shape(serve, query, said):
    response = get(serve, f"/v1/kv/events?{query}")

    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "BadRequestError"
