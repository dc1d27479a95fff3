"""Requests, timelines, retained tokens and prefixes through HTTP."""

import asyncio
import base64

import numpy as np
import pytest

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.inspection.requests import read_retention
from serve.conftest import PATIENCE_S, client_of
from support.kv_load import BLUE, RED, read, running, two_tenants

CAP = 32


@pytest.fixture(scope="module")
def evicting():
    return LLM(
        "quire-tiny",
        dtype="float32",
        kv=KVConfig(memory="4MiB", evict=f"h2o:cap={CAP}"),
        verify=False,
    )


async def finished_completion(client, headers=None, **body):
    body = {"prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True} | body
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


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
        assert row["exact"]
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
            found, causes = {}, []
            while "memory" not in causes:
                assert not call.done()
                found = await read(client, "requests?limit=3")
                causes = [row["waiting"]["cause"] for row in found["waiting"]]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return found

    body = serve(main)

    first, second, *_ = body["waiting"]
    assert first["waiting"]["cause"] == "memory"
    why = first["waiting"]
    assert 0 <= why["free_bytes"] < why["needed_bytes"] + why["promised_bytes"]
    assert (second["waiting"]["cause"], second["waiting"]["ahead"]) == ("queue", 1)
    assert second["waiting"]["after"] == first["request_id"]
    assert first["state"] == "waiting"
    assert len(body["waiting"]) <= 3
    assert first["kv_bytes"] == 0


def test_timeline_of_a_request(serve):
    async def main(client):
        done = await finished_completion(client)
        async with running(client, prompts=("A cat",)) as [row]:
            return (
                await read(client, f"requests/{done['id']}-0"),
                await read(client, f"requests/{row['request_id']}"),
            )

    finished, open_one = serve(main)

    kinds = [event["kind"] for event in finished["timeline"]]
    assert (kinds[0], kinds[-1]) == ("admitted", "freed")
    assert "chunk" in kinds
    assert finished["timeline"][-1]["reason"] == "finished"
    assert finished["timeline"][-1]["kv_bytes"] > 0
    times = [event["time_s"] for event in finished["timeline"]]
    assert times == sorted(times)
    assert finished["num_events"] == len(kinds)
    first = finished["timeline"][0]
    assert first["waited_s"] == first["time_s"] - finished["arrival_s"] >= 0
    assert [event for event in finished["timeline"][1:] if "waited_s" in event] == []
    assert finished["codec"] == "float32"
    assert [event["kind"] for event in open_one["timeline"]][:2] == ["admitted", "chunk"]


def test_tokens_of_an_exact_request_are_retained_by_all_lanes(serve, llm):
    async def main(client):
        async with running(client) as [row]:
            return await read(client, f"requests/{row['request_id']}/tokens?lanes=true")

    body = serve(main)

    assert body["texts"][:4] == [llm.model.tokenizer.decode([i]) for i in body["token_ids"][:4]]
    assert len(body["retained"]) == body["computed_tokens"]
    assert set(body["retained"]) == {body["num_lanes"]}
    assert len(body["lanes"]) == len(body["bitmaps"]) == body["num_lanes"]
    assert body["prompt_tokens"] < body["num_tokens"]


@pytest.fixture
def serve_evicting(evicting):
    """Run `main(client)` with an application whose requests evict tokens."""

    def run(main, **options):
        async def with_client():
            async with client_of(evicting, **options) as client:
                return await main(client)

        return asyncio.run(asyncio.wait_for(with_client(), PATIENCE_S))

    return run


def test_tokens_of_an_evicting_request_match_its_lanes(serve_evicting, evicting):
    async def main(client):
        async with running(client, prompts=("Once upon a time there was a cat. " * 6,)) as [row]:
            request_id = row["request_id"]
            row = await read(client, f"requests/{request_id}")
            while not row["num_evictions"]:
                row = await read(client, f"requests/{request_id}")
            return row, await read(client, f"requests/{request_id}/tokens?lanes=true")

    row, body = serve_evicting(main)

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
    engine = evicting.engine
    request_id = engine.submit(
        GenerationRequest(
            list(range(10, 90)),
            SamplingParams(max_tokens=40, ignore_eos=True),
            record_evictions=True,
        )
    )
    while not engine.requests()[0].eviction.num_evictions:
        engine.step()
    request = engine.requests()[0]
    last = engine.eviction_trace(request_id)[-1]

    found = read_retention(engine.pool, request)

    retained = [np.flatnonzero(lane[: last.num_computed]).tolist() for lane in found.mask()]
    assert retained == [lane.tolist() for lane in last.retained]
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()


def test_pages_of_the_tokens_are_given_in_parts(serve):
    async def main(client):
        async with running(client, prompts=("Once upon a time there was a cat",)) as [row]:
            path = f"requests/{row['request_id']}/tokens"
            return await read(client, f"{path}?limit=3"), await read(
                client, f"{path}?first=2&limit=2"
            )

    first, second = serve(main)

    assert len(first["token_ids"]) == len(first["texts"]) == len(first["retained"]) == 3
    assert second["first"] == 2
    assert second["token_ids"][0] == first["token_ids"][2]
    assert "bitmaps" not in first
    assert all(body["retained_tokens"] == body["computed_tokens"] > 3 for body in (first, second))


@pytest.mark.parametrize(
    "options",
    [{"n": 3}, {"n": 2, "max_tokens": 150, "use_beam_search": True, "temperature": 0}],
)
def test_sequences_of_a_request_have_their_own_rows(serve, options):
    async def main(client):
        async with running(client, **options) as rows:
            found = await read(client, "requests")
            last = found["running"][-1]["request_id"].replace("#", "%23")
            tokens = await read(client, f"requests/{last}/tokens")
            return rows, found, tokens

    _, body, tokens = serve(main)

    assert len({row["request_id"] for row in body["running"]}) == len(body["running"]) >= 2
    assert len({row["group"] for row in body["running"]}) == 1
    assert set(tokens["retained"]) == {tokens["num_lanes"]}


@pytest.mark.parametrize("path", ["requests/nothing", "requests/nothing/tokens"])
def test_unknown_request_gets_404(serve, path):
    response = serve(lambda client: client.get(f"/v1/kv/{path}"))

    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"
    assert response.json()["error"]["param"] == "request_id"


def test_tenant_sees_no_request_of_another_tenant(serve):
    async def main(client):
        done = await finished_completion(client, headers=RED)
        async with running(client, prompts=("A cat",), headers=RED) as [row]:
            paths = [
                f"requests/{done['id']}-0",
                f"requests/{row['request_id']}",
                f"requests/{row['request_id']}/tokens",
            ]
            found = [await client.get(f"/v1/kv/{path}", headers=BLUE) for path in paths]
            assert [(await read(client, path, headers=RED))["object"] for path in paths]
            return found, await read(client, "requests", headers=BLUE)

    refused, listed = serve(main, tenant_keys=two_tenants())

    assert [response.status_code for response in refused] == [404] * 3
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
        for end in (
            "The cat slept all day long in the sun. " * 3,
            "The dog ran to the river. " * 4,
        ):
            await finished_completion(client, prompt=COMMON + end)
        return await read(client, "prefixes?limit=2000")

    body = serve(main)

    block = llm.engine.scheduler.sequence_memory.prefix
    chains = body["data"]
    root = next(
        i for i, one in enumerate(chains) if (one["text"] or "").startswith("Once upon a t")
    )
    children = [one for one in chains if one["parent"] == root]
    assert chains[root]["start"] == 0
    assert len(children) >= 2
    assert all(one["start"] == chains[root]["tokens"] for one in children)
    assert all(one["tokens"] == one["blocks"] * block.block_tokens for one in chains)
    assert sum(one["bytes"] for one in chains) == len(block) * block.block_bytes
    assert all(one["references"] == 0 and one["idle_s"] >= 0 for one in chains)
    assert all(one["parent"] is None or one["parent"] < i for i, one in enumerate(chains))


def test_prefixes_are_limited_with_their_parents(serve):
    async def main(client):
        for number in range(6):
            await finished_completion(client, prompt=COMMON + f"{number} cats. " * 12)
        return await read(client, "prefixes?limit=3")

    body = serve(main)

    assert len(body["data"]) <= 3 < body["num_chains"]
    assert all(one["parent"] is None or one["parent"] < i for i, one in enumerate(body["data"]))


def test_tenant_sees_only_its_own_prefixes(serve):
    async def main(client):
        await finished_completion(client, headers=RED, prompt=COMMON)
        return [await read(client, "prefixes", headers=headers) for headers in (RED, BLUE)]

    red, blue = serve(main, tenant_keys=two_tenants())

    assert {one["tenant"] for one in red["data"]} == {"red"}
    assert red["data"][0]["text"].startswith("Once upon")
    assert blue["data"] == []
    assert blue["num_blocks"] == blue["num_left_out"] == 0


def test_references_count_running_requests(serve):
    async def main(client):
        async with running(client, prompts=(COMMON,)):
            return await read(client, "prefixes?limit=2000")

    body = serve(main)

    used = [one for one in body["data"] if one["references"]]
    assert used
    assert all(one["idle_s"] is None for one in used)
