"""What the server answers: every path, every kind of error, and the events of streams."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any

import httpx

from golden.cases import case
from golden.workshop import Workshop
from quire.api.llm import LLM
from quire.errors import InvariantError
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.tenant_keys import TenantKeys

PROMPT = "<|doc|>Once upon a time"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
KEY = "sk-red-00000000"
KEYS = TenantKeys({"red": (KEY,)})
PATIENCE_S = 120.0

Client = httpx.AsyncClient
Talk = Callable[[Client], Awaitable[Any]]
Posts = dict[str, tuple[str, dict[str, object]]]
Call = tuple[str, str, dict[str, Any]]
Answers = dict[str, object]


def serve(llm: LLM, talk: Talk, **options: Any) -> Any:
    """What a conversation with a fresh server comes to; the LLM stays open."""

    async def main() -> Any:
        app = create_app(llm, ServerConfig(max_body="64KiB"), **options)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with Client(transport=transport, base_url="http://localhost") as client:
                return await talk(client)

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def get(path: str, **fields: object) -> Call:
    return "GET", path, fields


def answers(llm: LLM, calls: dict[str, Call], *, drains: bool = False, **options: Any) -> Answers:
    """Answers by name, of a fresh server that may be shutting down."""

    async def talk(client: Client) -> Answers:
        if drains:
            _service_behind(client).drain()
        found = {
            name: await client.request(m, p, **fields) for name, (m, p, fields) in calls.items()
        }
        return {name: answer(response) for name, response in found.items()}

    return serve(llm, talk, **options)


def post_all(workshop: Workshop, posts: Posts) -> Answers:
    calls = {name: ("POST", path, {"json": body}) for name, (path, body) in posts.items()}
    return answers(workshop.served, calls)


def answer(response: httpx.Response) -> Answers:
    headers = {n: v for n, v in response.headers.items() if n.startswith(("x-", "www-", "allow"))}
    headers |= {"x-request-id": "NEW"} if "x-request-id" in headers else {}
    body = response.json() if response.content else None
    return {"status": response.status_code, "headers": headers, "body": body}


def completion(**options: object) -> tuple[str, dict[str, object]]:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, body | options


def chat(**options: object) -> tuple[str, dict[str, object]]:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return CHAT, body | options


# ---- answers -----------------------------------------------------------------------------------


@case(maps=("*.logprobs.top_logprobs",), exact=("*.headers.*", "*.logprobs.tokens"))
def server_completions(workshop: Workshop) -> object:
    posts = {
        "plain": completion(),
        "several": completion(prompt=[PROMPT, "Hello"], n=2, temperature=1.0, seed=3),
        "logprobs": completion(logprobs=1, echo=True),
        "stopped": completion(stop=["ic"], max_tokens=12),
        "beams": completion(use_beam_search=True, n=2),
        "evicting": completion(prompt=PROMPT * 8, evict="full"),
        "ignored_field": completion(favourite_colour="red"),
    }
    return post_all(workshop, posts)


@case(exact=("*.headers.*", "*.token"))
def server_chat(workshop: Workshop) -> object:
    posts = {
        "plain": chat(),
        "several": chat(n=2, temperature=1.0, seed=3),
        "logprobs": chat(logprobs=True, top_logprobs=1),
    }
    return post_all(workshop, posts)


def events_of(response: httpx.Response) -> dict[str, object]:
    """The events of a stream: the first, all together, the last, and how it ends."""
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return {
        "media_type": response.headers["content-type"],
        "framing": sorted({line.partition(" ")[0] for line in lines[:-1]}),
        "first": chunks[0],
        "all": chunks,
        "last": chunks[-1],
        "ending": lines[-2],
    }


@case(
    exact=("*.media_type", "*.framing", "*.ending"),
    loose=("*.all.usage.*", "*.text_offset", "*.logprobs.content.bytes"),
    maps=("*.logprobs.top_logprobs",),
)
def server_streams(workshop: Workshop) -> object:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    counted = {"stream_options": {"continuous_usage_stats": True}}
    eos = list(workshop.model.generation.eos_token_ids)
    posts = {
        "completion": completion(**options),
        "completion_logprobs": completion(logprobs=1, **options),
        "completion_counted": completion(**options | counted),
        "chat": chat(**options),
        "chat_logprobs": chat(logprobs=True, top_logprobs=1, **options),
        "failing": completion(**options, allowed_token_ids=eos, min_tokens=2, ignore_eos=False),
    }

    async def talk(client: Client) -> Answers:
        return {
            name: events_of(await client.post(path, json=body))
            for name, (path, body) in posts.items()
        }

    return serve(workshop.served, talk)


@case(exact=("*.tokens", "*.token_strs", "*.body.prompt", "*.body.data.id", "*.root"))
def server_small_paths(workshop: Workshop) -> object:
    posts = {
        "tokenize": ("/tokenize", {"prompt": "Hello é", "return_token_strs": True}),
        "tokenize_chat": ("/tokenize", {"messages": MESSAGES}),
        "detokenize": ("/detokenize", {"tokens": [5, 6, 700]}),
    }
    gets = {name: get(f"/{name}") for name in ("health", "ready", "version")}
    gets |= {"models": get("/v1/models"), "model": get("/v1/models/quire-tiny")}
    return post_all(workshop, posts) | answers(workshop.served, gets)


# ---- the KV memory -----------------------------------------------------------------------------


@case(
    loose=("*_bytes", "*.bytes", "*.pages", "*tokens", "*.axes.*", "*.extents.*"),
    maps=("*.axes.references", "*.axes.sharing"),
)
def server_kv(workshop: Workshop) -> object:
    async def talk(client: Client) -> dict[str, object]:
        client.headers.update({"authorization": f"Bearer {KEY}"})
        found = None
        while found is None:  # a request may end before the first answer
            found = await ledger_of_a_running_request(client)
        path = "/v1/kv/events?kinds=admitted,chunk,freed&since=0&limit=1000"
        return {"tenants_ledger": found, "events": (await client.get(path)).json()}

    async def ledger_of_a_running_request(client: Client) -> dict[str, Any] | None:
        body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}
        task = asyncio.create_task(client.post(COMPLETIONS, json=body))
        running = None
        while not task.done() and running is None:
            ledger = (await client.get("/v1/kv/ledger")).json()
            running = ledger if any(r["kv_bytes"] for r in ledger["requests"]) else None
        assert (await task).status_code == 200
        return running

    async def after_one(client: Client) -> httpx.Response:
        """After one request: its prefix is cached and no request runs."""
        path, body = completion(prompt=PROMPT * 8)
        assert (await client.post(path, json=body)).status_code == 200
        return await client.get("/v1/kv/ledger")

    idle = serve(workshop.served, after_one)
    return serve(workshop.served, talk, tenant_keys=KEYS) | {"idle_ledger": idle.json()}


# ---- errors ------------------------------------------------------------------------------------


REFUSED: Posts = {
    "field": completion(temperature=-1),
    "field_of_another_type": completion(max_tokens="many"),
    "inner_field": (CHAT, {"messages": [{"content": "x"}]}),
    "unsupported": completion(suffix="the end"),
    "near_miss": completion(temperatur=1),
    "empty_prompt": completion(prompt=""),
    "context": completion(prompt=[3] * 5_000),
    "never_fits": completion(max_tokens=1_000, limit_max_tokens=False),
    "eviction_rule": completion(evict="h2o:cap=16"),
    "unknown_model": completion(model="gpt-9"),
    "unknown_token": ("/detokenize", {"tokens": [100_000]}),
    "two_texts": ("/tokenize", {"prompt": "a", "messages": MESSAGES}),
    "no_messages": (CHAT, {"messages": []}),
    "no_such_path": ("/v1/images/generations", {}),
    "too_large": completion(prompt="a" * 100_000),
}
ERRORS = ("*.headers.*",)


@case(exact=ERRORS)
def server_refusals(workshop: Workshop) -> object:
    not_json = {"content": b"{prompt", "headers": {"content-type": "application/json"}}
    calls = {
        "not_json": ("POST", COMPLETIONS, not_json),
        "not_announced": ("POST", COMPLETIONS, {"content": b"{}"}),
        "wrong_method": get(COMPLETIONS),
        "unknown_kind": get("/v1/kv/events?kinds=nonsense"),
        "unknown_parameter": get("/v1/kv/events?kind=freed"),
    }
    unknown = {"authorization": "Bearer sk-unknown-00000"}
    keyless = {"no_key": get("/v1/models"), "unknown_key": get("/v1/models", headers=unknown)}
    refused = post_all(workshop, REFUSED) | answers(workshop.served, calls)
    return refused | answers(workshop.served, keyless, tenant_keys=KEYS)


@case(exact=ERRORS)
def server_failures(workshop: Workshop) -> object:
    eos = list(workshop.model.generation.eos_token_ids)
    failing = completion(allowed_token_ids=eos, min_tokens=2, ignore_eos=False)
    path, body = completion()
    draining = {"draining": ("POST", path, {"json": body}), "not_ready": get("/ready")}
    found = post_all(workshop, {"answer_failed": failing})
    found |= {"bug": serve(workshop.served, _meet_a_bug)}
    return found | answers(workshop.served, draining, drains=True) | _dead(workshop)


async def _meet_a_bug(client: Client) -> dict[str, object]:
    def buggy(*_: object) -> Any:
        raise ZeroDivisionError

    with _replaced(_service_behind(client), "check_model", buggy):
        return answer(await client.post("/tokenize", json={"prompt": "a"}))


def _service_behind(client: Client) -> Any:
    transport: Any = client._transport
    return transport.app.state.service


def _dead(workshop: Workshop) -> Answers:
    llm = workshop.llm()

    async def talk(client: Client) -> Answers:
        path, body = completion()
        with _replaced(llm.engine, "step", _broken):
            during = answer(await client.post(path, json=body))
        dead = answer(await client.post(path, json=body))
        health = answer(await client.get("/health"))
        return {"engine_dies": during, "engine_is_dead": dead, "unhealthy": health}

    return serve(llm, talk)


def _broken() -> Any:
    raise InvariantError("off by one page")


@contextmanager
def _replaced(of: object, name: str, value: object) -> Any:
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)
