import asyncio
import base64
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.layout.eviction import KEEP_ALL
from quire.serve.config import ServerConfig, is_loopback
from quire.serve.dashboard.routes import ASSETS_PATH, dashboard_paths
from quire.serve.tenant_keys import TenantKeys
from quire.version import __version__
from serve.conftest import COMPLETIONS, USER, error_of, ok, refused
from support.kv_load import BLUE, RED, running, two_tenants

KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",)})


def test_model_card_has_the_longest_length_and_the_served_name(get, llm, send):
    [card] = get("/v1/models").json()["data"]
    longest = llm.engine.scheduler.peaks.longest_request(llm.model.spec.max_positions, KEEP_ALL)
    assert (card["id"], card["root"], card["object"]) == ("quire-tiny", "quire-tiny", "model")
    # 4 MiB at 8,192 B per token, and an output token without KV
    assert card["max_model_len"] == longest == 513

    paths = ("/v1/models", "/v1/models/org/mine", "/v1/models/quire-tiny")
    listed, named, other = send(
        *(("GET", path, {}) for path in paths), served_model_name="org/mine"
    )

    [card] = listed.json()["data"]
    assert (card["id"], card["root"]) == ("org/mine", "quire-tiny")
    assert isinstance(card["created"], int)
    assert named.json() | {"created": card["created"]} == card
    assert other.status_code == 404


@pytest.mark.parametrize("keys", [None, KEYS])
def test_the_root_names_paths_and_the_page_can_send_a_key_if_tenants_have_keys(serve, get, keys):
    async def main(client):
        root = (await client.get("/")).json()
        pages = {name: await client.get(path) for name, path in root["paths"].items()}
        return root, {name: page.status_code for name, page in pages.items() if name != "api"}

    root, statuses = serve(main, tenant_keys=keys)
    assert (root["name"], root["version"]) == ("Quire", __version__)
    # counters of the server need a key
    assert statuses.pop("metrics") == (200 if keys is None else 401)
    assert statuses == {"documentation": 200, "health": 200, "dashboard": 200}
    assert "dashboard" not in get("/", dashboard=False).json()["paths"]
    assert get("/version").json() == {"version": __version__}

    schema = get("/openapi.json", tenant_keys=keys).json()
    schemes = schema["components"].get("securitySchemes")
    paths = {p: [o.get("security") for o in found.values()] for p, found in schema["paths"].items()}

    if keys is None:
        assert schemes is None
        assert all(not any(found) for found in paths.values())
        return
    [scheme] = schemes.values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path in ("/v1/chat/completions", "/v1/kv/prefixes", "/metrics", "/v1/models"):
        assert paths[path] == [[{"API key": []}]]


def test_tokenize_and_detokenize_a_text_or_a_chat(post, llm):
    text = "Hello é wörld 你"
    body = post("/tokenize", prompt=text, return_token_strs=True).json()

    assert body["tokens"] == llm.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert (body["token_strs"][0], body["max_model_len"]) == ("H", 513)
    assert post("/detokenize", tokens=body["tokens"]).json() == {"prompt": text}
    chat = post("/tokenize", messages=[USER], add_generation_prompt=False).json()
    assert (chat["tokens"], chat["token_strs"]) == (llm.encode_chat([USER]), None)


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
    error = error_of(post(path, **body), 400)
    assert (error["param"], error["type"]) == (param, "BadRequestError")


def test_model_without_a_tokenizer_accepts_token_ids_only(send, llm, monkeypatch):
    ids = llm.encode("<|doc|>Once upon a time")
    without_tokenizer = replace(llm.model, tokenizer=None)
    monkeypatch.setattr(llm, "model", without_tokenizer)
    monkeypatch.setattr(llm.engine, "model", without_tokenizer)
    by_ids, *refusals = send(
        ("POST", COMPLETIONS, {"json": {"prompt": ids, "max_tokens": 2, "logprobs": 0}}),
        ("POST", COMPLETIONS, {"json": {"prompt": "text"}}),
        ("POST", "/tokenize", {"json": {"prompt": "text"}}),
        ("POST", "/tokenize", {"json": {"messages": [{"role": "user"}]}}),
        ("POST", "/detokenize", {"json": {"tokens": [5]}}),
    )

    choice = by_ids.json()["choices"][0]
    assert choice["text"] == ""
    assert [token.split(":")[0] for token in choice["logprobs"]["tokens"]] == ["token_id"] * 2
    for response, param in zip(refusals, ["prompt", "prompt", "messages", "tokens"], strict=True):
        assert "has no tokenizer" in refused(response, param)


def test_draining_server_is_healthy_and_not_ready(serve):
    async def main(client):
        before = await client.get("/ready")
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).status_code == 200
        client._transport.app.state.service.drain()
        after = [await client.get(path) for path in ("/ready", "/health")]
        return before, *after, await client.post("/tokenize", json={"prompt": "Once"})

    before, ready, health, after = serve(main)
    assert (before.status_code, before.content) == (200, b"")
    assert (ready.status_code, ready.content) == (503, b"")
    assert health.status_code == 200
    assert "shutting down" in error_of(after, 503)["message"]


# ---- documentation without other hosts, /ping and /load ------------------------------------------


def test_documentation_needs_no_key_and_no_other_host(serve):
    async def main(client):
        page = await client.get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        files = [await client.get(f"/{link}") for link in links]
        schema = await client.get("/" + re.search(r"url: '([^']+)'", page.text)[1])
        return page, links, files, schema

    page, links, files, schema = serve(main, tenant_keys=KEYS)
    assert page.status_code == 200
    assert "https://" not in page.text
    assert not any(link.startswith(("/", "http")) for link in links)
    assert [found.status_code for found in files] == [200] * 3
    assert sum(len(found.content) for found in files) > 1_000_000
    assert "/v1/chat/completions" in schema.json()["paths"]


def test_load_is_the_number_of_open_requests_also_of_a_tenant(serve):
    async def load(client):
        return (await client.get("/load")).json()["server_load"]

    async def main(client):
        idle, busy = await load(client), 0
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "n": 2}
        open_one = asyncio.create_task(client.post("/v1/completions", json=body))
        while not busy and not open_one.done():
            await asyncio.sleep(0.005)
            busy = await load(client)
        await open_one
        return idle, busy, await load(client)

    assert serve(main) == (0, 1, 0)

    async def main(client):
        async with running(client, prompts=("Once", "Twice"), headers=RED):
            answers = [await client.get("/load", headers=headers) for headers in (RED, BLUE)]
        return [answer.json()["server_load"] for answer in answers]

    assert serve(main, tenant_keys=two_tenants()) == [2, 0]


# ---- /v1/embeddings ------------------------------------------------------------------------------

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["<|doc|>Once upon a time", "<|doc|>The king"]


@pytest.fixture
def embed(post):
    return lambda **body: [one["embedding"] for one in ok(post(EMBEDDINGS, **body))["data"]]


def test_embeddings_equal_normalized_hidden_states_of_transformers(llm, post):
    body = ok(post(EMBEDDINGS, input=TEXTS, model="quire-tiny"))

    assert body["object"] == "list"
    assert [one["index"] for one in body["data"]] == [0, 1]
    num_tokens = sum(len(llm.encode(text)) for text in TEXTS)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == num_tokens
    model = AutoModelForCausalLM.from_pretrained(llm.model.folder, dtype=torch.float32)
    for text, one in zip(TEXTS, body["data"], strict=True):
        with torch.inference_mode():
            found = model(torch.tensor([llm.encode(text)]), output_hidden_states=True)
        states = found.hidden_states[-1][0, -1].numpy()
        assert np.allclose(one["embedding"], states / np.linalg.norm(states), atol=2e-4)


def test_all_forms_of_input_give_the_same_embedding(llm, embed):
    ids = llm.encode(TEXTS[0])
    [plain] = embed(input=TEXTS[0])
    assert np.linalg.norm(plain) == pytest.approx(1, abs=1e-6)
    for value in ([TEXTS[0]], ids, [ids]):
        assert np.allclose(embed(input=value), [plain], atol=1e-6)

    [coded] = embed(input=TEXTS[0], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), dtype="<f4").tolist() == plain
    assert len(embed(input="a", dimensions=llm.model.spec.hidden_size)[0]) == len(plain)
    [mean] = embed(input=TEXTS[0], pooling="mean", normalize=False)
    assert not np.allclose(np.array(mean) / np.linalg.norm(mean), plain, atol=1e-3)
    assert np.linalg.norm(mean) != pytest.approx(1, abs=1e-3)
    cut = embed(input=TEXTS[0], truncate_prompt_tokens=3)
    assert np.allclose(cut, embed(input=ids[-3:]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input")),
        *(({"input": [[]]}, "input"), ({"input": [1, "a"]}, "input")),
        *(({"input": [10**6]}, "input"), ({"input": [1] * 5000}, "input")),
        *(({"dimensions": 7}, "dimensions"), ({"dimensions": 0}, "dimensions")),
        *(({"encoding_format": "hex"}, "encoding_format"), ({"pooling": "cls"}, "pooling")),
        *(({"max_tokens": 5}, "max_tokens"), ({"priority": True}, "priority")),
        *(({"deadline_s": -1}, "deadline_s"), ({"evict": "nothing"}, "evict")),
    ],
)
def test_an_invalid_body_is_refused_with_the_name_of_the_field(post, body, param):
    refused(post(EMBEDDINGS, **({} if param == "input" else {"input": "a"}) | body), param)


def test_wrong_dimensions_are_refused_before_and_prompt_tokens_counted(llm, post, send):
    computed = llm.engine.stats().num_processed_tokens
    message = refused(post(EMBEDDINGS, input=[[5] * 300], dimensions=7), "dimensions")
    assert "expected `dimensions` of" in message
    assert llm.engine.stats().num_processed_tokens == computed

    wrong = {"json": {"input": "a", "model": "text-embedding-3-small"}}
    calls = ("POST", EMBEDDINGS, wrong), ("POST", EMBEDDINGS, {"json": {"input": TEXTS}})
    other, _, metrics = send(*calls, ("GET", "/metrics", {}))
    assert other.status_code == 404
    counts = re.findall(r"^quire_prompt_tokens_total.* (\S+)$", metrics.text, re.MULTILINE)
    assert sum(map(float, counts)) > 0


# ---- files of the dashboard ----------------------------------------------------------------------

_FOLDER = files("quire.serve.dashboard") / "assets"
ASSETS = {file.name: file.read_text(encoding="utf-8") for file in _FOLDER.iterdir()}


def test_files_have_security_headers_exist_and_name_no_other_host(send):
    found = send(*(("GET", path, {}) for path in sorted(dashboard_paths())))

    assert len(found) >= 15
    for response in found:
        assert response.status_code in (200, 308), response.url
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"

    for name, text in ASSETS.items():
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=\"|innerHTML", text), name
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, name
    named = set(re.findall(r'dashboard/assets/([\w.]+)"', ASSETS["index.html"]))
    for name, text in ASSETS.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert named == set(ASSETS) - {"index.html"}


def test_files_need_no_key_and_are_not_sent_again_unchanged_or_without_dashboard(get, send):
    first = get(f"{ASSETS_PATH}/app.css")
    again = get(f"{ASSETS_PATH}/app.css", {"if-none-match": first.headers["etag"]})
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")
    wrong = {"headers": {"authorization": "Bearer sk-wrong-000000"}}
    calls = [("GET", "/dashboard", {}), ("GET", f"{ASSETS_PATH}/main.js", {})]
    calls += [("GET", "/dashboard", wrong), ("GET", f"{ASSETS_PATH}/nothing.js", {})]
    responses = send(*calls, ("GET", "/v1/kv/overview", {}), tenant_keys=two_tenants())
    assert [response.status_code for response in responses] == [200, 200, 200, 401, 401]

    assert get("/dashboard", dashboard=False).status_code == 404
    assert get("/dashboard", host="0.0.0.0").status_code == 404
    assert not any(map(is_loopback, ("192.168.0.1", "example.org", "::", "")))


OUTSIDE = ("nothing.js", "..%2F__init__.py", "%2e%2e/routes.py", "__init__.py", "..%2fmain.py")


@pytest.mark.parametrize("folder", [ASSETS_PATH, "/docs"])
def test_other_files_are_not_served(send, folder):
    responses = send(*(("GET", f"{folder}/{name}", {}) for name in OUTSIDE))
    assert [response.status_code for response in responses] == [404] * len(OUTSIDE)


@pytest.mark.parametrize(
    ("options", "with_keys", "expected"),
    [
        *(({}, False, True), ({"host": "localhost"}, False, True), ({"host": "::1"}, False, True)),
        *(({"host": "0.0.0.0"}, False, False), ({"host": "0.0.0.0"}, True, True)),
        ({"host": "0.0.0.0", "dashboard": True}, False, True),
        ({"dashboard": False}, True, False),
    ],
)
def test_dashboard_is_served_by_default_only_where_prompts_are_safe(options, with_keys, expected):
    assert ServerConfig(**options).has_dashboard(with_keys=with_keys) is expected
