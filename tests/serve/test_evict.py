"""Eviction per request: the `evict` field, and evicted tokens in the usage."""

import asyncio
import sys

import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from serve.conftest import client_of


@pytest.fixture(scope="module")
def llm():
    kv = KVConfig(memory="4MiB", evict_allow="h2o")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


def test_request_sets_its_policy_and_usage_reports_evicted_tokens(complete):
    full = complete(max_tokens=40, ignore_eos=True)
    capped = complete(max_tokens=40, ignore_eos=True, evict="h2o:cap=16,every=4")

    assert full["usage"]["evicted_tokens"] == 0
    assert capped["usage"]["evicted_tokens"] > 20
    assert full["usage"]["evictions"] == 0 < capped["usage"]["evictions"] <= 10
    assert capped["usage"]["completion_tokens"] == 40


@pytest.fixture(scope="module")
def percent_llm():
    kv = KVConfig(memory="8MiB", evict="snapkv:cap=50%,when=prefill_end")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [300], "max_tokens": 4}),
        ("/v1/completions", {"prompt": [[300], [300] * 66], "n": 2, "max_tokens": 4}),
        ("/v1/completions", {"prompt": [300] * 40, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": [300], "max_tokens": 4, "kv_budget": "1%"}),
        ("/v1/completions", {"prompt": [300], "max_tokens": 4, "evict": "snapkv:cap=0.01"}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
        ("/v1/messages", {"model": "quire-tiny", "messages": HI, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": ["hello", "<|doc|>"]}),
    ],
)
def test_short_prompt_is_served_by_a_default_rule_with_a_cap_in_percent(percent_llm, path, body):
    async def main():
        async with client_of(percent_llm) as client:
            return await client.post(path, json=body)

    response = asyncio.run(main())

    assert response.status_code == 200, response.text
    assert '"error":{' not in response.text


def test_rule_whose_packages_are_missing_is_refused(monkeypatch):
    kv = KVConfig(memory="4MiB", evict_allow="h2o;kmeans")
    llm = LLM("quire-tiny", dtype="float32", kv=kv, verify=False)
    monkeypatch.setitem(sys.modules, "scipy", None)

    async def main():
        async with client_of(llm) as client:
            body = {"prompt": "Once", "evict": "kmeans:cap=64"}
            return await client.post("/v1/completions", json=body)

    response = asyncio.run(main())

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "evict"
    assert "kmeans needs scipy" in response.json()["error"]["message"]
