"""`quire batch` under SIGKILL: a restart completes the remaining lines without duplicates."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from support import zoo
from support.command_line import read_records, write_lines

KILLS = 6
NUM_LINES = 80
INVALID_EVERY = 40
DONE = 1  # exit status of a complete run with invalid lines
PATIENCE_S = 30.0


class Forker:
    """A process that runs `quire` in child processes that can be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *arguments: object, kill_when: Callable[[], bool] | None = None) -> int:
        """The exit status, negative for the signal that ended it."""
        self._process.stdin.write(json.dumps([str(a) for a in arguments]) + "\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        if kill_when is not None:
            while not kill_when():
                time.sleep(0.002)
            with suppress(ProcessLookupError):  # the child has already ended
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def forker():
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    running = Forker()
    yield running
    running.close()


def kill_conditions(
    rng: random.Random, target: Path, patience_s: float
) -> Iterator[Callable[[], bool]]:
    """Conditions of kills: at the start, while loading, and shortly after more was written."""
    for index in range(KILLS):
        size = target.stat().st_size if target.exists() else 0
        wanted = size + rng.randrange(1, 4000) if index % 3 else 0
        end_s = time.monotonic() + (patience_s if index % 3 else rng.uniform(0.0, 0.5))
        late_s = rng.uniform(0.0, 0.1)
        yield partial(is_over, target, wanted, late_s, end_s)


def is_over(path: Path, size: int, late_s: float, end_s: float) -> bool:
    if size and path.exists() and path.stat().st_size >= size:
        time.sleep(late_s)
        return True
    return time.monotonic() > end_s


def requests() -> list[object]:
    lines: list[object] = [
        {"prompt": [2 + i % 120, 7, 9 + i % 11], "max_tokens": 4 + i % 12, "temperature": 1.0}
        for i in range(NUM_LINES)
    ]
    lines[INVALID_EVERY - 1 :: INVALID_EVERY] = ["{"] * (NUM_LINES // INVALID_EVERY)
    return lines


def outputs_by_line(path: Path) -> dict[int, tuple[object, ...]]:
    records = read_records(path)
    outputs = {
        r["line"]: (r["id"], r["text"], r["finish_reason"], r["usage"], r["error"]) for r in records
    }
    assert len(outputs) == len(records), "a line has two records"
    return {line: without_timings(output) for line, output in outputs.items()}


def without_timings(output: tuple[object, ...]) -> tuple[object, ...]:
    name, text, reason, usage, error = output
    tokens = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    return name, text, reason, tokens, error


def test_batch_killed_at_any_time_writes_every_result_once(forker, tmp_path: Path):
    rng = random.Random(2026)
    model = zoo.save("llama", tmp_path / "model")
    source = write_lines(tmp_path / "in.jsonl", requests())
    options = (
        "--kv-memory",
        "32KiB",
        "--max-num-seqs",
        "4",
        "--seed",
        "11",
        "--no-verify",
    )
    uninterrupted, target = tmp_path / "uninterrupted.jsonl", tmp_path / "out.jsonl"

    assert forker.run("batch", model, source, uninterrupted, *options) == DONE

    sizes = set()
    for kill_when in kill_conditions(rng, target, PATIENCE_S):
        status = forker.run("batch", model, source, target, *options, kill_when=kill_when)
        size = target.stat().st_size if target.exists() else 0
        sizes.add(size)
        if status == DONE:
            break
        assert status == -signal.SIGKILL
        if size and rng.random() < 0.5:  # simulates a machine failure during a write
            os.truncate(target, rng.randrange(max(0, size - 300), size))

    assert forker.run("batch", model, source, target, *options) == DONE
    assert outputs_by_line(target) == outputs_by_line(uninterrupted)
    assert outputs_by_line(target).keys() == set(range(1, NUM_LINES + 1))
    assert len(sizes - {0}) >= 3, "too few kills occurred during the run"


@pytest.mark.slow
def test_installed_program_completes_after_a_kill(tmp_path: Path):
    program = Path(sys.executable).with_name("quire")
    if not program.is_file():
        pytest.skip("quire is not installed here as a script")
    model = zoo.save("llama", tmp_path / "model")
    source, target = write_lines(tmp_path / "in.jsonl", requests()), tmp_path / "out.jsonl"
    command = [program, "batch", model, source, target, "--kv-memory", "32KiB"]
    command += ["--max-num-seqs", "2", "--threads", "1"]

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (target.exists() and target.stat().st_size) and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.wait()
    second = subprocess.run(command, capture_output=True)

    assert second.returncode == DONE, second.stderr
    assert outputs_by_line(target).keys() == set(range(1, NUM_LINES + 1))
