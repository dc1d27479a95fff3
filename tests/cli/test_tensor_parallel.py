import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from support.busy_server import server_process

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
OPTIONS = ["--dtype", "float32", "--device", "cpu", "--temperature", "0", "--max-tokens", "24"]


def generate(*options: str) -> list[int]:
    command = [sys.executable, "-m", "quire", "generate", "quire-tiny", "--json"]
    command += ["--prompt", "<|doc|>Once upon a time", *OPTIONS, *options]
    limits = {"timeout": PATIENCE_S, "check": True}
    done = subprocess.run(command, capture_output=True, text=True, **limits)
    return json.loads(done.stdout)["token_ids"]


@pytest.mark.parametrize("flag", ["--tensor-parallel", "-tp"])
def test_generate_prints_the_text_of_one_rank(flag: str) -> None:
    assert generate(flag, "2") == generate()


def test_ranks_load_the_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "my_rule.py"
    file.write_text(
        "from quire.policies.recent import Recent\n"
        "from quire.policies.registry import register\n"
        "register('of_file')(type('OfFile', (Recent,), {'__dataclass_fields__': "
        "Recent.__dataclass_fields__}))\n"
    )
    rule = ("--evict", "of_file:cap=8", "--policy-file", str(file))
    assert generate("-tp", "2", *rule) == generate("--evict", "recent:cap=8")


def test_server_answers_and_ends_with_its_ranks() -> None:
    body = {"prompt": "<|doc|>Once", "max_tokens": 16, "temperature": 0}
    texts = []
    for options in ([], ["-tp", "2"]):
        with server_process("--dtype", "float32", *options) as (process, url):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
            texts.append(answer.json()["choices"][0]["text"])
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            assert not ranks_of(process.pid)

    assert texts[0] == texts[1]


def test_server_with_a_killed_rank_refuses_requests() -> None:
    with server_process("-tp", "2") as (process, url):
        body = {"prompt": "<|doc|>Once", "max_tokens": 500, "ignore_eos": True}
        [rank] = ranks_of(process.pid)
        subprocess.run(["kill", "-9", rank], check=True)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)

        assert answer.status_code == 503
        deadline_s = time.monotonic() + PATIENCE_S
        while httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200:
            assert time.monotonic() < deadline_s
        assert not ranks_of(process.pid)


def ranks_of(process_id: int) -> list[str]:
    command = ["pgrep", "-P", str(process_id), "-f", "rank_process"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.split()
