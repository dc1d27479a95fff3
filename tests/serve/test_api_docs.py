"""/docs without other hosts, /ping and /load."""

import asyncio
import re

import pytest

from quire.serve.tenant_keys import TenantKeys
from support.kv_load import BLUE, RED, running, two_tenants

KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",)})


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
    assert len(links) == 3
    assert not any(link.startswith(("/", "http")) for link in links)
    assert [found.status_code for found in files] == [200] * 3
    assert sum(len(found.content) for found in files) > 1_000_000
    assert "/v1/chat/completions" in schema.json()["paths"]


def security_of(serve, **options):
    schema = serve(lambda client: client.get("/openapi.json"), **options).json()
    paths = {
        path: operation.get("security")
        for path, operations in schema["paths"].items()
        for operation in operations.values()
    }
    return schema["components"].get("securitySchemes"), paths


def test_the_page_can_send_a_key_if_tenants_have_keys(serve):
    schemes, paths = security_of(serve, tenant_keys=KEYS)

    assert [(found["type"], found["scheme"]) for found in schemes.values()] == [("http", "bearer")]
    assert paths["/v1/chat/completions"] == paths["/v1/kv/prefixes"] == [{"API key": []}]
    assert paths["/metrics"] == paths["/v1/models"] == [{"API key": []}]


def test_without_keys_the_page_asks_for_none(serve):
    schemes, paths = security_of(serve)

    assert schemes is None
    assert set(paths.values()) == {None}


def test_other_files_of_the_package_are_not_served(serve):
    async def main(client):
        names = ("__init__.py", "..%2fmain.py", "nothing")
        return [(await client.get(f"/docs/{name}")).status_code for name in names]

    assert serve(main) == [404] * 3


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_the_health(serve, method):
    assert serve(lambda client: client.request(method, "/ping")).status_code == 200


def test_load_is_the_number_of_open_requests(serve):
    async def main(client):
        idle = (await client.get("/load")).json()
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "n": 2}
        open_one = asyncio.create_task(client.post("/v1/completions", json=body))
        busy = {}
        while not busy.get("server_load") and not open_one.done():
            await asyncio.sleep(0.005)
            busy = (await client.get("/load")).json()
        await open_one
        return idle, busy, (await client.get("/load")).json()

    idle, busy, ended = serve(main)

    assert (idle, busy, ended) == ({"server_load": 0}, {"server_load": 1}, {"server_load": 0})


def test_load_of_a_tenant_counts_only_its_own_requests(serve):
    async def main(client):
        async with running(client, prompts=("Once", "Twice"), headers=RED):
            answers = [await client.get("/load", headers=headers) for headers in (RED, BLUE)]
        return [answer.json()["server_load"] for answer in answers]

    assert serve(main, tenant_keys=two_tenants()) == [2, 0]
