"""`quire batch` under SIGKILL: a restart completes the remaining lines without duplicates."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from support import zoo
from support.command_line import read_records, write_lines
from support.forking import Program

KILLS = 6
NUM_LINES = 80
INVALID_EVERY = 40
DONE = 1  # exit status of a complete run with invalid lines


def run(*arguments: object, call: int | None = None) -> tuple[int, int | None]:
    """The exit status of `quire batch`, and its number of calls unless it was killed at one."""
    program = Program("support.forking:run_batch_until", call, *map(str, arguments))
    with closing(program):
        printed = program.stdout.read().split()
        return program.wait(), int(printed[-1]) if printed else None


def requests() -> list[object]:
    lines: list[object] = [
        {"prompt": [2 + i % 120, 7, 9 + i % 11], "max_tokens": 4 + i % 12, "temperature": 1.0}
        for i in range(NUM_LINES)
    ]
    lines[INVALID_EVERY - 1 :: INVALID_EVERY] = ["{"] * (NUM_LINES // INVALID_EVERY)
    return lines


def outputs_by_line(path: Path) -> dict[int, tuple[object, ...]]:
    records = read_records(path)
    names, counts = ("id", "text", "finish_reason", "error"), ("prompt_tokens", "completion_tokens")
    outputs = {
        r["line"]: (*(r[name] for name in names), *((r["usage"] or {}).get(n) for n in counts))
        for r in records
    }
    assert len(outputs) == len(records), "a line has two records"
    return outputs


@pytest.mark.slow
def test_batch_killed_at_any_time_writes_every_result_once(tmp_path: Path):
    rng = random.Random(2026)
    model = zoo.save("llama", tmp_path / "model")
    source = write_lines(tmp_path / "in.jsonl", requests())
    options = ("--kv-memory=32KiB", "--max-num-seqs=4", "--seed=11", "--no-verify")
    uninterrupted, target = tmp_path / "uninterrupted.jsonl", tmp_path / "out.jsonl"

    status, num_calls = run(model, source, uninterrupted, *options)
    assert status == DONE

    sizes, part = set(), num_calls // 7
    for number in range(KILLS):  # while it starts, and after more was written
        call = rng.randrange(part) + (part if number % 3 else 0)
        status, _ = run(model, source, target, *options, call=1 + call)
        size = target.stat().st_size if target.exists() else 0
        sizes.add(size)
        assert status == -signal.SIGKILL
        if size and rng.random() < 0.5:  # simulates a machine failure during a write
            os.truncate(target, rng.randrange(max(0, size - 300), size))

    assert run(model, source, target, *options)[0] == DONE
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
