"""A server process with requests that never end: for the dashboard's browser test and pictures."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx

READY_S = 120.0
LONG_TOKENS = 500
"""Output tokens of the requests that evict most."""
STORY = "<|doc|>Once upon a time there was a cat that lived in a house with a dog and a bird. "
PROMPTS = (
    (STORY * 2 + "The cat slept all day long in the sun.", {"evict": "h2o:cap=96"}),
    (STORY * 3 + "The dog ran to the river and came back with a stick.", {"evict": "h2o:cap=64"}),
    (STORY * 2 + "The bird sang a song about the moon.", {}),
    (STORY * 2 + "One day a boy came to the house.", {}),
    ("<|doc|>The history of the city begins with a market near the river.", {}),
    ("<|doc|>A recipe for bread: take flour, water, salt and yeast.", {"evict": "h2o:cap=48"}),
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Load:
    """Clients that send a request again whenever it has ended; `without` is left out of prompts."""

    def __init__(self, url, headers=None, clients=22, without=""):
        self._without = without
        self._url, self._headers, self._clients = url, headers, clients
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._stopping = threading.Event()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join(READY_S)

    async def _run(self):
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as client:
            tasks = [asyncio.create_task(self._send(client, i)) for i in range(self._clients)]
            while not self._stopping.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, client, number):
        while True:
            prompt, options = PROMPTS[number % len(PROMPTS)]
            prompt = prompt.replace(self._without, "")
            tokens = LONG_TOKENS if number % len(PROMPTS) == 1 else 60 + 37 * (number % 7)
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
            body |= {"temperature": 0.9, "stream": True} | options
            async with client.stream(
                "POST", "/v1/completions", json=body, headers=self._headers
            ) as response:
                async for _ in response.aiter_bytes():
                    pass
            number += self._clients


@contextmanager
def served(*options, model="quire-tiny"):
    """Run `quire serve` with a small KV memory; yields its URL."""
    with server_process(*options, model=model) as (_, url):
        yield url


@contextmanager
def server_process(*options, model="quire-tiny", stderr=subprocess.DEVNULL):
    """Run `quire serve` with a small KV memory; yields its process and its URL."""
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0"]
    command += ["--kv-memory", "4MiB", "--swap-space", "3MiB", "--evict-allow", "all", *options]
    source = Path(__file__).parents[2] / "src"
    path = f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    options = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **options)
    try:
        matches = (re.search(r"at (http://\S+)/v1", line) for line in process.stdout)
        found = next(filter(None, matches), None)
        assert found, "the server did not start"
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
