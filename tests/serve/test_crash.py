"""The server process under load: killed and restarted, or asked to end."""

import asyncio
import signal
import time

import httpx
import pytest

from support.busy_server import server_process

pytestmark = pytest.mark.slow

CLIENTS = 48
TOKENS = 120
PATIENCE_S = 60.0


async def stream(client, url, number, started):
    """The end of one stream: "[DONE]", an error of the connection, or a status."""
    body = {"prompt": f"<|doc|>{number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    last = ""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                last = line or last
                started.add(number)
    except httpx.TransportError as error:
        return type(error).__name__
    return last.removeprefix("data: ")


async def interrupted(process, url, signal_number, late):
    """Send a signal while all streams run; return their ends, and those of later requests."""
    started = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        tasks = [asyncio.create_task(stream(client, url, n, started)) for n in range(CLIENTS)]
        while len(started) < CLIENTS:
            await asyncio.sleep(0.01)
        process.send_signal(signal_number)
        later = []
        for number in range(late):
            await asyncio.sleep(0.05)
            later.append(await stream(client, url, CLIENTS + number, set()))
        return await asyncio.gather(*tasks), later


def test_killed_server_restarts_at_its_port_and_no_client_hangs():
    with server_process() as (process, url):
        port = url.rsplit(":", 1)[1]
        ends, _ = asyncio.run(interrupted(process, url, signal.SIGKILL, 0))
        assert process.wait(PATIENCE_S) == -signal.SIGKILL

    with server_process("--port", port) as (_, restarted):
        body = {"prompt": "<|doc|>Once", "max_tokens": 3}
        answer = httpx.post(f"{restarted}/v1/completions", json=body, timeout=PATIENCE_S)
        memory = httpx.get(f"{restarted}/v1/kv/overview").json()["memory"]

    assert restarted == url
    assert len(ends) == CLIENTS
    assert set(ends) <= {"RemoteProtocolError", "ReadError"}
    assert answer.status_code == 200
    assert memory["requests_bytes"] == 0


def test_sigterm_under_load_finishes_streams_and_refuses_new_requests():
    with server_process() as (process, url):
        ends, later = asyncio.run(interrupted(process, url, signal.SIGTERM, 3))
        ended_s = time.monotonic()
        code = process.wait(PATIENCE_S)

    assert ends == ["[DONE]"] * CLIENTS
    assert later == ["503"] * 3
    assert code == 0
    assert time.monotonic() - ended_s < PATIENCE_S
