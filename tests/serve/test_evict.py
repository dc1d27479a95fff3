"""Eviction per request: the `evict` field, and evicted tokens in the usage."""

import sys

import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig


@pytest.fixture(scope="module")
def llm():
    kv = KVConfig(memory="4MiB", evict_allow="h2o")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


def test_request_sets_its_policy_and_usage_reports_evicted_tokens(complete):
    full = complete(max_tokens=40, ignore_eos=True)
    capped = complete(max_tokens=40, ignore_eos=True, evict="h2o:cap=16,every=4")

    assert full["usage"]["evicted_tokens"] == 0
    assert capped["usage"]["evicted_tokens"] > 20
    assert capped["usage"]["completion_tokens"] == 40


def test_policy_that_is_not_allowed_is_refused(post):
    response = post("/v1/completions", prompt="Once", evict="tova:cap=99")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "evict"
    assert "--evict-allow 'tova'" in response.json()["error"]["message"]


def test_rule_whose_packages_are_missing_is_refused(post, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)

    response = post("/v1/completions", prompt="Once", evict="kmeans:cap=64")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "evict"
    assert "kmeans needs scipy" in response.json()["error"]["message"]
