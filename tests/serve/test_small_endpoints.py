"""Endpoints for models, health, version, tokenize and detokenize."""

from dataclasses import replace

import pytest

from quire.layout.eviction import KEEP_ALL
from quire.serve.tenant_keys import TenantKeys
from quire.version import __version__
from serve.conftest import refused


def get(serve, path, **options):
    return serve(lambda client: client.get(path), **options)


def test_model_card_has_the_longest_length_that_fits(serve, llm):
    [card] = get(serve, "/v1/models").json()["data"]

    longest = llm.engine.scheduler.peaks.longest_request(llm.model.spec.max_positions, KEEP_ALL)
    assert card["id"] == card["root"] == "quire-tiny"
    assert card["object"] == "model"
    # 4 MiB at 8,192 B per token, and an output token without KV
    assert card["max_model_len"] == longest == 513


def test_model_can_be_served_under_another_name(serve):
    options = {"served_model_name": "org/mine"}

    [card] = get(serve, "/v1/models", **options).json()["data"]

    assert (card["id"], card["root"]) == ("org/mine", "quire-tiny")
    assert get(serve, "/v1/models/org/mine", **options).json() == card | {"created": ANY_TIME}
    assert get(serve, "/v1/models/quire-tiny", **options).status_code == 404


class _AnyTime:
    def __eq__(self, other):
        return isinstance(other, int)

    __hash__ = None


ANY_TIME = _AnyTime()


def test_version_is_the_package_version(serve):
    assert get(serve, "/version").json() == {"version": __version__}


@pytest.mark.parametrize("keys", [None, TenantKeys({"a": ("sk-a-2f0c77d1",)})])
def test_the_root_names_paths_that_exist_and_needs_no_key(serve, keys):
    async def main(client):
        root = (await client.get("/")).json()
        pages = {name: await client.get(path) for name, path in root["paths"].items()}
        return root, {name: page.status_code for name, page in pages.items() if name != "api"}

    root, statuses = serve(main, tenant_keys=keys)

    assert (root["name"], root["version"]) == ("Quire", __version__)
    metrics_status = 200 if keys is None else 401  # counters of the server need a key
    assert statuses.pop("metrics") == metrics_status
    assert statuses == {"documentation": 200, "health": 200, "dashboard": 200}


def test_the_root_names_no_dashboard_if_there_is_none(serve):
    assert "dashboard" not in get(serve, "/", dashboard=False).json()["paths"]


def test_tokenize_and_detokenize_a_text(post, llm):
    text = "Hello é wörld 你"

    body = post("/tokenize", prompt=text, return_token_strs=True).json()

    assert body["tokens"] == llm.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["token_strs"][0] == "H"
    assert body["max_model_len"] == 513
    assert post("/detokenize", tokens=body["tokens"]).json() == {"prompt": text}


def test_tokenize_applies_the_chat_template(post, llm):
    messages = [{"role": "user", "content": "Hello"}]

    body = post("/tokenize", messages=messages, add_generation_prompt=False).json()

    assert body["tokens"] == llm.encode_chat(messages)
    assert body["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "text"}, "tokens"),
    ],
)
def test_invalid_text_and_tokens_are_refused(post, path, body, param):
    response = post(path, **body)

    refused(response, param)
    assert response.json()["error"]["type"] == "BadRequestError"


def test_model_without_a_tokenizer_accepts_token_ids_only(serve, llm, monkeypatch):
    ids = llm.encode("<|doc|>Once upon a time")
    without_tokenizer = replace(llm.model, tokenizer=None)
    monkeypatch.setattr(llm, "model", without_tokenizer)
    monkeypatch.setattr(llm.engine, "model", without_tokenizer)

    async def main(client):
        by_ids = {"prompt": ids, "max_tokens": 2, "logprobs": 0}
        return [
            await client.post("/v1/completions", json=by_ids),
            await client.post("/v1/completions", json={"prompt": "text"}),
            await client.post("/tokenize", json={"prompt": "text"}),
            await client.post("/tokenize", json={"messages": [{"role": "user"}]}),
            await client.post("/detokenize", json={"tokens": [5]}),
        ]

    by_ids, *refusals = serve(main)

    choice = by_ids.json()["choices"][0]
    assert choice["text"] == ""
    assert [token.split(":")[0] for token in choice["logprobs"]["tokens"]] == ["token_id"] * 2
    for response, param in zip(refusals, ["prompt", "prompt", "messages", "tokens"], strict=True):
        assert "has no tokenizer" in refused(response, param)


def test_draining_server_is_healthy_and_not_ready(serve):
    async def main(client):
        before = await client.get("/ready")
        client._transport.app.state.service.drain()
        after = [await client.get("/ready"), await client.get("/health")]
        return before, *after, await client.post("/tokenize", json={"prompt": "Once"})

    before, ready, health, after = serve(main)

    assert (before.status_code, before.content) == (200, b"")
    assert (ready.status_code, ready.content) == (503, b"")
    assert health.status_code == 200
    assert after.status_code == 503
    assert "shutting down" in after.json()["error"]["message"]
