"""Requests that run while a test reads the paths under /v1/kv."""

import asyncio
from contextlib import asynccontextmanager

from quire.serve.tenant_keys import TenantKeys

RED, BLUE = ({"authorization": f"Bearer sk-{name}-00000000"} for name in ("red", "blue"))


def two_tenants():
    return TenantKeys({"red": ("sk-red-00000000",), "blue": ("sk-blue-00000000",)})


async def read(client, path, **options):
    """The body of a path under /v1/kv that must succeed."""
    response = await client.get(f"/v1/kv/{path}", **options)
    assert response.status_code == 200, response.text
    return response.json()


@asynccontextmanager
async def running(client, *, prompts=("Once upon a time",), headers=None, **body):
    """Requests with KV, one per prompt; yields their rows once all hold KV."""
    body = {"max_tokens": 400, "ignore_eos": True} | body
    calls = [
        asyncio.create_task(
            client.post("/v1/completions", json=body | {"prompt": prompt}, headers=headers)
        )
        for prompt in prompts
    ]
    try:
        rows = []
        while len(rows) < len(prompts) or not all(
            row["computed_tokens"] >= row["prompt_tokens"] for row in rows
        ):
            assert not any(call.done() for call in calls)
            rows = (await read(client, "requests", headers=headers))["running"]
        yield rows
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
