"""Runs a worker in its environment and reads its result."""

import json
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.config import PeersConfig
from benchmarks.peers.engines import Engine, preloaded, python_of
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.workers.protocol import Job

ROOT = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"^(?:\(.*?\)\s*)?[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")
_BROKEN = re.compile(r"ModuleNotFoundError|ImportError|bin/python: ")
_LONGEST_REASON = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker without a result.

    Attributes:
        reason: the error, in one line.
    """

    reason: str


def run_worker(engine: Engine, job: Job, config: PeersConfig) -> dict[str, Any] | Failure:
    """Run one job in a new process.

    Args:
        engine: the engine.
        job: its job.
        config: environments, time limit, and the command that the process runs under.
    """
    python = python_of(engine, config.environments)
    if python is None:
        folder = config.environments / engine.environment
        return Failure(f"no environment in {folder}: run {_make(config)}")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        module = f"benchmarks.peers.workers.{engine.worker}"
        command = [*config.run_under, str(python), "-m", module, str(file)]
        found = _finished(command, variables(engine, config), temporary, config.timeout_s)
    if isinstance(found, Failure) and not engine.is_quire and _BROKEN.search(found.reason):
        folder = config.environments / engine.environment
        return Failure(f"{found.reason}; to rebuild it: rm -r {folder}, then {_make(config)}")
    return found


def _make(config: PeersConfig) -> str:
    """Command that builds the environments in the folder of the run."""
    default = config.environments == FOLDER.resolve()
    return "make peers" if default else f"make peers PEERS={config.environments}"


def variables(engine: Engine, config: PeersConfig) -> dict[str, str]:
    """Environment variables of a worker: only Quire's can import quire."""
    found = dict(os.environ)
    paths = [str(ROOT)]
    if engine.is_quire:
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["OMP_NUM_THREADS"] = str(config.threads)
    libraries = preloaded(engine, config.environments)
    if libraries:
        found["LD_PRELOAD"] = os.pathsep.join(libraries)
    return found


def _finished(
    command: list[str], environment: dict[str, str], folder: str, timeout_s: float
) -> dict[str, Any] | Failure:
    """Wait for the process; its group is killed after `timeout_s`."""
    with (Path(folder) / "out").open("w+") as out, (Path(folder) / "err").open("w+") as err:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, cwd=folder, start_new_session=True
            )
        except OSError as error:
            return Failure(f"{command[0]}: {error.strerror}")
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Failure(f"not finished after {timeout_s:g} s")
        finally:
            _kill_group(process)
        out.seek(0)
        err.seek(0)
        return result_of(status, out.read(), err.read())


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill the worker, if it runs, and the processes that it left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def result_of(status: int, out: str, err: str) -> dict[str, Any] | Failure:
    """The result of a finished worker: the last line of its output that is a JSON object.

    Args:
        status: exit status; negative: the signal that ended the process.
        out: its standard output.
        err: its standard error.
    """
    if status:
        return Failure(f"exit status {status}: {reason_of(err or out)}")
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                break
            return found
    return Failure("the worker printed no result")


def reason_of(text: str) -> str:
    """The line of an output that names the error: the last exception, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    found = (errors or lines or ["no output"])[-1]
    return found[:_LONGEST_REASON]
