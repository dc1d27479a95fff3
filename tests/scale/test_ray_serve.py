"""Replicas on Ray: the client of OpenAI, a killed replica, and scaling, under load."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace

import httpx
import openai
import pytest

from quire.config.kv_config import KVConfig
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe
from quire.scale.routing.registry import RouterConfig
from quire.scale.serve.recipe import ServeRecipe
from quire.serve.config import ServerConfig
from support.ray_processes import command, free_port, require_ray, wait_until_ready

pytestmark = pytest.mark.slow
require_ray()

PROMPT = "<|doc|>Once upon a time"
PATIENCE_S = 120.0
ENGINE = EngineRecipe(
    model="quire-tiny",
    options={"dtype": "float32", "kv": KVConfig(memory="16MiB"), "verify": False},
    threads=1,
)
RECIPE = ServeRecipe(
    engine=ENGINE,
    server=ServerConfig(host="127.0.0.1", port=free_port(), shutdown_timeout=30.0),
    ray=RayConfig(
        enabled=True,
        replicas="2",
        cpus=0.5,
        stats_period_s=0.5,
        upscale_delay_s=0.5,
        downscale_delay_s=2.0,
        target_ongoing=4,
    ),
    routing=RouterConfig(name="kv_aware"),
)
URL = f"http://127.0.0.1:{RECIPE.server.port}"


@pytest.fixture(scope="module")
def serving(local_ray):
    """Ray Serve with its proxy; applications are deployed by the tests."""
    from ray import serve

    from quire.scale.serve.launch import start_serve

    start_serve(RECIPE)
    yield local_ray
    serve.shutdown()


def deploy(recipe):
    from ray import serve

    from quire.scale.serve.application import application
    from quire.scale.serve.launch import APPLICATION

    serve.run(application(recipe), name=APPLICATION, route_prefix="/")
    wait_until_ready(URL)


@pytest.fixture
def two_replicas(serving):
    deploy(RECIPE)
    wait_for_replicas(2)
    return serving


def replicas():
    """Actors of the engines that run."""
    from ray import serve

    found = serve.status().applications["quire"].deployments["engine"]
    return found.replica_states.get("RUNNING", 0)


def wait_for_replicas(number):
    deadline_s = time.monotonic() + PATIENCE_S
    while replicas() != number:
        assert time.monotonic() < deadline_s, f"{replicas()} replicas, expected {number}"
        time.sleep(0.1)


def client():
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


async def complete(source, number, **options):
    """One completion; returns its text."""
    body = {"model": "quire-tiny", "prompt": PROMPT, "max_tokens": 24, "seed": number}
    found = await source.completions.create(**body | options)
    assert found.usage.completion_tokens > 0
    return found.choices[0].text


async def stream(source, number, **options):
    """One streamed completion; returns its text and the finish reason of its last chunk."""
    body = {"model": "quire-tiny", "prompt": PROMPT, "max_tokens": 24, "seed": number}
    text, reason = "", None
    async for chunk in await source.completions.create(**body | options, stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


# ---- two replicas ------------------------------------------------------------------------------


def test_the_client_of_openai_gets_equal_outputs_whole_and_streamed(two_replicas):
    async def main():
        source = client()
        whole = await asyncio.gather(*(complete(source, n) for n in range(8)))
        parts = await asyncio.gather(*(stream(source, n) for n in range(8)))
        models = await source.models.list()
        turns = [{"role": "user", "content": "Hello"}]
        chat = await source.chat.completions.create(
            model="quire-tiny", messages=turns, max_tokens=4
        )
        return whole, parts, models, chat

    whole, parts, models, chat = asyncio.run(main())

    assert [text for text, _ in parts] == whole
    assert all(reason in ("length", "stop") for _, reason in parts)
    assert [model.id for model in models.data] == ["quire-tiny"]
    assert chat.choices[0].message.role == "assistant"


def test_both_replicas_serve_and_a_prefix_has_its_replica(two_replicas):
    headers = {"content-type": "application/json"}
    prompts = [f"<|doc|>Story {n}: " + "once upon a time " * 8 for n in range(6)]

    def replica_of(prompt):
        body = {"prompt": prompt, "max_tokens": 2}
        answer = httpx.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-quire-replica"]

    rounds = [[replica_of(prompt) for prompt in prompts] for _ in range(3)]

    assert len(set(rounds[0])) == 2
    assert rounds[1] == rounds[2] == rounds[0]


def test_errors_headers_and_metrics_pass(two_replicas):
    refused = httpx.post(
        f"{URL}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": -1},
        headers={"x-request-id": "mine"},
    )
    metrics = httpx.get(f"{URL}/metrics", timeout=30).text
    names = {
        line.split('replica="')[1].split('"')[0]
        for line in metrics.splitlines()
        if line.startswith("quire_kv_memory_bytes{")
    }

    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")
    assert refused.headers["x-request-id"] == "mine"
    assert len(names) == 2
    assert httpx.get(f"{URL}/nowhere").status_code == 404


# ---- a killed replica --------------------------------------------------------------------------


def kill_one(ray):
    """Kill the process of one engine, as a crash would."""
    named = ray.util.list_named_actors(all_namespaces=True)
    engines = [actor for actor in named if "#engine#" in actor["name"]]
    assert len(engines) == 2
    ray.kill(ray.get_actor(**engines[0]))
    return engines[0]["name"]


def test_no_request_without_output_is_lost_with_a_replica(two_replicas):
    async def one(source, number, outcomes):
        """A whole response may never fail; a stream only after it has begun."""
        if number % 2:
            await complete(source, number, max_tokens=64)
            outcomes["whole"] += 1
            return
        chunks = 0
        try:
            body = {"model": "quire-tiny", "prompt": PROMPT, "max_tokens": 64, "seed": number}
            async for chunk in await source.completions.create(**body, stream=True):
                chunks += bool(chunk.choices[0].text)
        except openai.APIError as error:
            by_event = chunks and "the replica that ran the request has ended" in str(error)
            outcomes["ended by an error event" if by_event else f"lost: {error}"] += 1
        else:
            outcomes["streamed"] += 1

    async def main():
        source, outcomes = client(), Counter()
        gate = asyncio.Semaphore(32)

        async def bounded(number):
            async with gate:
                await one(source, number, outcomes)

        tasks = [asyncio.create_task(bounded(number)) for number in range(160)]
        while sum(outcomes.values()) < 30:
            await asyncio.sleep(0.02)
        killed = await asyncio.to_thread(kill_one, two_replicas)
        await asyncio.gather(*tasks)
        return killed, outcomes

    killed, outcomes = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    print(f"killed {killed}: {dict(outcomes)}")
    assert outcomes["whole"] == 80
    assert outcomes["streamed"] + outcomes["ended by an error event"] == 80, outcomes
    wait_for_replicas(2)  # Ray replaces it


# ---- scaling -----------------------------------------------------------------------------------


def test_scaling_up_and_down_under_load_loses_no_request(serving):
    deploy(replace(RECIPE, ray=replace(RECIPE.ray, replicas="1:2")))
    wait_for_replicas(1)

    async def load(source, width, until, counts):
        async def worker(number):
            while not until.is_set():
                _, reason = await stream(source, number, max_tokens=32)
                assert reason in ("length", "stop")
                counts["requests"] += 1
                number += width

        await asyncio.gather(*(worker(number) for number in range(width)))

    async def main():
        source, counts = client(), Counter()
        heavy, light = asyncio.Event(), asyncio.Event()
        running = [
            asyncio.create_task(load(source, 1, light, counts)),
            asyncio.create_task(load(source, 16, heavy, counts)),
        ]
        await asyncio.to_thread(wait_for_replicas, 2)
        counts["at two replicas"] = counts["requests"]
        heavy.set()
        await asyncio.to_thread(wait_for_replicas, 1)
        light.set()
        await asyncio.gather(*running)
        return counts

    counts = asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))

    print(dict(counts))
    assert counts["requests"] > counts["at two replicas"] > 0


# ---- the command -------------------------------------------------------------------------------


def test_quire_serve_on_ray_serves_until_sigterm(ray_environment):
    port = free_port()
    options = ("--ray", "--ray-replicas", 1, "--ray-cpus", 0.5, "--port", port)
    quick = ("--dtype", "float32", "--kv-memory", "8MiB", "--no-verify", "--threads", 1)
    with command("serve", "quire-tiny", *options, *quick) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
        process.terminate()
        output, _ = process.communicate(timeout=PATIENCE_S)

    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
    assert f"Serving quire-tiny at {url}/v1" in output
    assert process.returncode == 0
