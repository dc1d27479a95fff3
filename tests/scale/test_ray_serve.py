import asyncio
import time
from collections import Counter

import httpx
import openai
import pytest

from support.ray_processes import ray_server, require_ray

pytestmark = pytest.mark.slow
require_ray()

PROMPT = "<|doc|>Once upon a time"
SAMPLING = {"model": "quire-tiny", "temperature": 1.0}
PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with ray_server(tmp_path_factory.mktemp("two"), "2", "--shutdown-timeout=20") as server:
        yield server


def client(server):
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    )


async def complete(source, number, max_tokens=24):
    found = await source.completions.create(
        prompt=f"<|doc|>Story {number}", max_tokens=max_tokens, seed=number, **SAMPLING
    )
    return found.choices[0].text


async def stream(source, number, max_tokens=24):
    """Yield the texts of a streamed completion; its end must have a finish reason."""
    reason = None
    async for chunk in await source.completions.create(
        prompt=f"<|doc|>Story {number}",
        max_tokens=max_tokens,
        seed=number,
        stream=True,
        **SAMPLING,
    ):
        reason = chunk.choices[0].finish_reason or reason
        yield chunk.choices[0].text
    assert reason in ("length", "stop")


async def streamed(source, number, max_tokens=24):
    return "".join([text async for text in stream(source, number, max_tokens)])


def run(server, main):
    """Run `main(source)` with a client of a server."""

    async def with_client():
        async with client(server) as source:
            return await asyncio.wait_for(main(source), PATIENCE_S)

    return asyncio.run(with_client())


def test_the_client_of_openai_gets_equal_outputs_whole_and_streamed(two):
    async def main(source):
        whole = await asyncio.gather(*(complete(source, n) for n in range(8)))
        parts = await asyncio.gather(*(streamed(source, n) for n in range(8)))
        models = await source.models.list()
        turns = [{"role": "user", "content": "Hello"}]
        chat = await source.chat.completions.create(
            model="quire-tiny", messages=turns, max_tokens=4
        )
        return whole, parts, models, chat

    whole, parts, models, chat = run(two, main)

    assert parts == whole
    assert len(set(whole)) > 4  # each request has its own seed
    assert [model.id for model in models.data] == ["quire-tiny"]
    assert chat.choices[0].message.role == "assistant"


def test_both_replicas_serve_and_a_prefix_has_its_replica(two):
    prompts = [f"<|doc|>Story {n}: " + "once upon a time " * 8 for n in range(6)]

    def replica_of(prompt):
        body = {"prompt": prompt, "max_tokens": 2}
        found = httpx.post(f"{two.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert found.status_code == 200, found.text
        return found.headers["x-quire-replica"]

    rounds = [[replica_of(prompt) for prompt in prompts] for _ in range(3)]

    assert set(rounds[0]) == two.replicas()
    assert rounds[1] == rounds[2] == rounds[0]


def test_errors_and_headers_pass(two):
    refused = httpx.post(
        f"{two.url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": -1},
        headers={"x-request-id": "mine"},
    )
    named = min(two.replicas())
    overview = httpx.get(f"{two.url}/v1/kv/overview", headers={"x-quire-replica": named})

    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")
    assert refused.headers.get_list("x-request-id") == ["mine"]
    assert (overview.status_code, overview.headers["x-quire-replica"]) == (200, named)
    assert httpx.get(f"{two.url}/nowhere").status_code == 404


def test_no_request_without_output_is_lost_with_a_replica(two):
    before = two.wait_for(2)
    tokens = 384  # many requests are unfinished when the engine is killed

    async def one(source, number, outcomes):
        """A whole response must never fail, a stream only after it has begun."""
        if number % 2:
            await complete(source, number, tokens)
            outcomes["whole"] += 1
            return
        num_texts = 0
        try:
            async for text in stream(source, number, tokens):
                num_texts += bool(text)
        except openai.APIError as error:
            in_events = num_texts and "the replica that ran the request has ended" in str(error)
            outcomes["ended by an error event" if in_events else f"lost: {error}"] += 1
        else:
            outcomes["streamed"] += 1

    async def main(source):
        outcomes, gate = Counter(), asyncio.Semaphore(32)

        async def bounded(number):
            async with gate:
                await one(source, number, outcomes)

        tasks = [asyncio.create_task(bounded(number)) for number in range(160)]
        while sum(outcomes.values()) < 30:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(two.kill_engine)
        await asyncio.gather(*tasks)
        return outcomes

    outcomes = run(two, main)

    print(f"one of two engines killed: {dict(outcomes)}")
    assert outcomes["whole"] == 80
    assert outcomes["streamed"] + outcomes["ended by an error event"] == 80, outcomes
    assert "sending it to another replica" in two.log.read_text()
    after = two.wait_for(2, without=before - two.replicas())  # Ray replaces it
    assert len(after & before) == 1


def test_scaling_up_and_down_under_load_loses_no_request(tmp_path):
    options = (
        *("--ray-target-ongoing=4", "--ray-upscale-delay=0.5", "--ray-downscale-delay=2"),
        *("--shutdown-timeout=30", "--router=least_loaded"),
    )

    async def load(source, width, until, counts):
        async def worker(number):
            while not until.is_set():
                assert await streamed(source, number, 32)
                counts["requests"] += 1
                number += width

        await asyncio.gather(*(worker(number) for number in range(width)))

    async def main(source):
        counts, started_s = Counter(), time.monotonic()
        heavy, light = asyncio.Event(), asyncio.Event()
        running = [
            asyncio.create_task(load(source, 1, light, counts)),
            asyncio.create_task(load(source, 16, heavy, counts)),
        ]
        await asyncio.to_thread(server.wait_for, 2)
        counts["at two engines"] = counts["requests"]
        counts["seconds to two engines"] = round(time.monotonic() - started_s)
        heavy.set()
        await asyncio.to_thread(server.wait_for, 1)
        counts["seconds to one engine"] = round(time.monotonic() - started_s)
        light.set()
        await asyncio.gather(*running)
        return counts

    with ray_server(tmp_path, "1:2", *options) as server:
        counts = run(server, main)
        status = server.stop()

    print(dict(counts))
    assert counts["requests"] > counts["at two engines"] > 0
    assert status == 0
    assert f"Serving quire-tiny at {server.url}/v1" in server.log.read_text()
