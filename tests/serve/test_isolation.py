"""Tenants of one server: prefix hits, requests, events and inspector of others; keys in logs."""

import logging
import subprocess
import sys

import httpx
import pytest

from quire.serve.tenant_keys import TenantKeys
from serve.conftest import PROMPT
from support.busy_server import server_process

KEY_A, KEY_B, METRICS_KEY = "sk-a-2f0c77d1-secret", "sk-b-51d09a3e-secret", "sk-m-77e1-secret"
KEYS = TenantKeys({"a": (KEY_A,), "b": (KEY_B,)})
A, B = ({"Authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))
LONG = f"{PROMPT} there was a king who had three sons and a daughter. " * 4
PATHS = ("completions", "chat/completions", "responses")


def body_of(path, text):
    if path == "completions":
        return {"prompt": text, "max_tokens": 2}
    if path == "responses":
        return {"input": text, "max_output_tokens": 2}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


def cached_tokens(response):
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("salt", [None, "shared"])
def test_prefix_of_a_tenant_is_no_hit_of_another_tenant(serve, llm, path, salt):
    text = f"{path} {salt} {LONG}"
    body = body_of(path, text) | ({} if salt is None else {"cache_salt": salt})
    computed = []

    async def main(client):
        hits = []
        for headers in (A, A, B, B):
            before = llm.engine.num_processed_tokens
            response = await client.post(f"/v1/{path}", json=body, headers=headers)
            hits.append(cached_tokens(response))
            computed.append(llm.engine.num_processed_tokens - before)
        return hits

    first, repeated, other, other_repeated = serve(main, tenant_keys=KEYS)

    assert (first, other) == (0, 0)
    assert repeated == other_repeated > 0
    # the time to first token follows the computed tokens: the other tenant computes its own prompt
    assert computed[0] == computed[2] > computed[1] == computed[3]


# ---- keys in logs --------------------------------------------------------------------------------


def secrets_in(text):
    return [key for key in (KEY_A, KEY_B, METRICS_KEY) if key in text]


def test_keys_and_prompts_are_not_logged_in_the_process(serve, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "the password of the vault is 4711"

    async def main(client):
        for headers in (A, B, {"Authorization": f"Bearer {METRICS_KEY}"}, {"x-api-key": KEY_A}):
            for path in PATHS:
                await client.post(f"/v1/{path}", json=body_of(path, secret), headers=headers)
                await client.post(f"/v1/{path}?key={KEY_A}", json={"prompt": 5}, headers=headers)
            await client.get("/metrics", headers=headers)

    serve(main, tenant_keys=KEYS, metrics_key=METRICS_KEY)

    records = [r for r in caplog.records if r.name.startswith(("quire", "uvicorn"))]
    text = "\n".join(record.getMessage() + str(record.args) for record in records)
    assert "POST /v1/completions" in text
    assert secrets_in(text) == []
    assert secret not in text


@pytest.mark.slow
def test_keys_are_not_in_the_output_of_the_process(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'a = "{KEY_A}"\nb = "{KEY_B}"\n')
    options = ("--tenant-keys", str(keys), "--metrics-key", METRICS_KEY, "--log-level", "debug")
    log = tmp_path / "log"
    with log.open("w") as stderr, server_process(*options, stderr=stderr) as (process, url):
        for headers in (A, B, {"Authorization": "Bearer sk-wrong-00000000"}):
            body = body_of("completions", "the password of the vault is 4711")
            httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            httpx.post(f"{url}/v1/completions?key={KEY_A}", content=b"{", headers=headers)
            httpx.get(f"{url}/metrics", headers=headers)
        process.terminate()
        out = process.stdout.read()

    written = out + log.read_text()
    assert "POST /v1/completions 200" in written
    assert [*secrets_in(written), *(t for t in ("sk-wrong", "4711") if t in written)] == []


@pytest.mark.slow
def test_keys_of_a_refused_key_file_are_not_in_the_message(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'a = "{KEY_A}"\nb = "{KEY_A}"\n')
    command = [sys.executable, "-m", "quire", "serve", "quire-tiny", "--tenant-keys", str(keys)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode
    assert "have the same" in done.stderr
    assert secrets_in(done.stdout + done.stderr) == []
