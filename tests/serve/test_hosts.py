"""Host names of requests to a local server without keys: no access by DNS rebinding."""

import pytest

from quire.serve.tenant_keys import TenantKeys

KEYS = TenantKeys({"default": ("sk-d-2f0c77d1",)})
OTHERS = ["evil.example", "evil.example:8000", "192.168.0.7", "localhost.evil.example", "[", ""]


def status(serve, name, path="/v1/models", headers=None, **options):
    headers = (headers or {}) | {"host": name}
    return serve(lambda client: client.get(path, headers=headers), **options).status_code


@pytest.mark.parametrize("host", OTHERS)
def test_local_server_without_keys_refuses_other_host_names(serve, host):
    assert status(serve, host) == 403
    assert status(serve, host, "/health") == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.0.1", "[::1]:8", "a.localhost"]
)
def test_local_server_accepts_its_own_names(serve, host):
    assert status(serve, host) == 200


def test_server_with_keys_or_another_address_accepts_every_host_name(serve):
    headers = {"authorization": "Bearer sk-d-2f0c77d1"}

    assert status(serve, "chat.example", headers=headers, tenant_keys=KEYS) == 200
    assert status(serve, "chat.example", host="0.0.0.0") == 200


def test_refusal_names_the_host_and_the_options(serve):
    response = serve(lambda client: client.get("/version", headers={"host": "evil.example"}))

    message = response.json()["error"]["message"]
    assert message.startswith("expected localhost or a loopback address in the header Host, got")
    assert "'evil.example'" in message
    assert "--api-key" in message
