"""API keys of tenants: parsing, lookup, and the tenant of a request."""

import hashlib
from pathlib import Path

import pytest

from quire.errors import ConfigError, UnknownName
from quire.serve.errors import Unauthorized
from quire.serve.rate_limits import RateLimit
from quire.serve.tenant_keys import (
    TenantFile,
    TenantKeys,
    read_tenant_keys,
    require_keys,
    with_default_keys,
)
from quire.tenancy.tenants import parse_tenants

KEY_A, KEY_B = "sk-a-2f0c77d1", "sk-b-51d09a3e"
KEYS = {"a": (KEY_A, "sk-a-9b2e4410"), "b": (KEY_B,)}
BODY = {"prompt": "Once", "max_tokens": 2, "temperature": 0}


def test_key_selects_the_tenant():
    keys = TenantKeys(KEYS)

    assert keys.tenant_of(f"Bearer {KEY_A}") == "a"
    assert keys.tenant_of("bearer  sk-a-9b2e4410 ") == "a"
    assert keys.tenant_of(f"Bearer {KEY_B}") == "b"


@pytest.mark.parametrize("header", ["Bearer unknown", "Bearer", "", f"Basic {KEY_A}", KEY_A, "ü x"])
def test_unknown_key_is_refused(header):
    with pytest.raises(Unauthorized, match="unknown API key"):
        TenantKeys(KEYS).tenant_of(header)


def test_without_keys_the_header_is_ignored():
    assert TenantKeys().tenant_of("Bearer anything") == "default"


@pytest.mark.parametrize("specs", [(), parse_tenants("a;b")])
def test_missing_key_is_refused_without_a_default_tenant(specs):
    with pytest.raises(Unauthorized, match="missing API key"):
        TenantKeys(KEYS, specs).tenant_of(None)

    assert TenantKeys(KEYS, parse_tenants("a;b;default")).tenant_of(None) == "default"


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"c": ("sk-c-00000000",)}, UnknownName, "unknown tenant with an API key 'c'"),
        ({"a": ("short",)}, ConfigError, "8 printable ASCII characters"),
        ({"a": ("sk-a-\n0000000",)}, ConfigError, "8 printable ASCII characters"),
        ({"a": ("sha256:00ff",)}, ConfigError, "64 hexadecimal digits, got 4 characters"),
        ({"a": (KEY_A,), "b": (KEY_A,)}, ConfigError, "'a' and 'b' have the same"),
        ({"a b": (KEY_A,)}, ConfigError, "tenant name"),
        *(
            (keys, ConfigError, "give --tenant-keys FILE, or add tenant 'default'")
            for keys in (None, {}, {"a": ()})
        ),
    ],
)
def test_invalid_keys_are_refused(keys, error, message):
    with pytest.raises(error, match=message):
        TenantKeys(keys, parse_tenants("a;b"))


def test_tenant_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'a = ["{KEY_A}", "sk-a-9b2e4410"]\nb = "{KEY_B}"\n')

    assert read_tenant_keys(path) == TenantFile(KEYS)


def test_tenant_file_has_digests_and_rate_limits(tmp_path):
    digest = hashlib.sha256(KEY_A.encode()).hexdigest()
    path = tmp_path / "keys.toml"
    path.write_text(f'[a]\nkeys = "sha256:{digest}"\ntokens_per_minute = 50\n[b]\nkeys = []\n')

    found = read_tenant_keys(path)

    assert found.rate_limits == {"a": RateLimit(tokens_per_minute=50)}
    assert TenantKeys(found.keys).tenant_of(f"Bearer {KEY_A}") == "a"


def test_keys_of_the_default_tenant_are_added():
    found = with_default_keys(TenantFile({"default": (KEY_A,), "b": ()}), (KEY_B,))

    keys = TenantKeys(found.keys)
    assert {keys.tenant_of(f"Bearer {key}") for key in (KEY_A, KEY_B)} == {"default"}
    assert with_default_keys(found, ()) is found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected at least one API key, got none: the server would be open"),
        ({"default": ()}, "expected at least one API key, got none: the server would be open"),
        ({"a": (KEY_A,), "b": ()}, "expected at least one API key of tenant 'b', got none"),
    ],
)
def test_file_without_keys_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        require_keys(TenantFile(keys), Path("keys.toml"))


def test_file_with_limits_of_the_default_tenant_is_accepted_with_other_keys():
    require_keys(TenantFile({"a": (KEY_A,), "default": ()}), Path("keys.toml"))


def test_default_tenant_with_a_key_needs_it():
    keys = TenantKeys(KEYS | {"default": ("sk-d-2f0c77d1",)}, parse_tenants("a;b;default"))

    assert keys.tenant_of("Bearer sk-d-2f0c77d1") == "default"
    with pytest.raises(Unauthorized, match="missing API key"):
        keys.tenant_of(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "is not TOML"),
        ("a = 5", "an API key or a list"),
        ("a = [1]", "an API key or a list"),
        ("[a]\nkey = 'sk-a-2f0c77d1'", "expected keys, evict, requests_per_minute and"),
        ("[a]\ntokens_per_minute = 0", "tenant 'a': expected tokens_per_minute"),
        ("[a]\nevict = 5\n", "tenant 'a': expected evict as a string, got 5"),
    ],
)
def test_invalid_key_file_is_refused(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_tenant_keys(path)


def test_missing_key_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read --tenant-keys"):
        read_tenant_keys(tmp_path / "none.toml")


# ---- through the server --------------------------------------------------------------------------


@pytest.fixture
def submitted(llm, monkeypatch):
    """The requests that reach the scheduler."""
    seen, submit = [], llm.engine.scheduler.submit
    monkeypatch.setattr(
        llm.engine.scheduler, "submit", lambda request: (seen.append(request), submit(request))[1]
    )
    return seen


def send(serve, body, headers=None, tenants="a;b"):
    return serve(
        lambda client: client.post("/v1/completions", json=body, headers=headers),
        tenant_keys=TenantKeys(KEYS, parse_tenants(tenants)),
    )


def test_tenant_is_taken_from_the_key_not_the_body(serve, submitted):
    headers = {"Authorization": f"Bearer {KEY_B}"}
    response = send(serve, BODY | {"tenant": "a", "cache_salt": "mine"}, headers)

    assert response.status_code == 200
    assert [(r.tenant, r.spec.cache_salt) for r in submitted] == [("b", "mine")]


def test_request_without_a_key_belongs_to_the_default_tenant(serve, submitted):
    assert send(serve, BODY, tenants="a;b;default").status_code == 200

    assert [(r.tenant, r.spec.cache_salt) for r in submitted] == [("default", "")]
