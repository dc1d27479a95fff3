"""`quire batch --ray`: equal records in the order of the lines, resumed after a kill."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from quire.config.kv_config import KVConfig
from quire.scale.batch import RECORD, BatchActor
from support.command_line import read_records, write_lines
from support.ray_processes import START_S, require_ray

pytestmark = pytest.mark.slow
require_ray()

QUICK = ("--dtype=float32", "--kv-memory=8MiB", "--no-verify", "--threads=1", "--seed=3")
ON_RAY = ("--ray", "--ray-replicas=2", "--ray-cpus=0.5")
NUM_LINES = 60


def quire_command(*arguments):
    return [sys.executable, "-m", "quire", *map(str, arguments)]


def run(*arguments):
    done = subprocess.run(
        quire_command(*arguments), capture_output=True, text=True, check=False, timeout=2 * START_S
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done


@pytest.fixture
def source(tmp_path):
    lines = [
        {"id": f"r{n}", "prompt": f"<|doc|>Story {n}", "max_tokens": 1 + n % 24}
        for n in range(NUM_LINES)
    ]
    lines[7] = {"id": "bad", "prompt": 3}
    lines[20] = ""
    return write_lines(tmp_path / "in.jsonl", lines)


def outputs(path):
    return [(r["line"], r["text"], r["finish_reason"], r["error"]) for r in read_records(path)]


def test_records_are_those_of_one_engine_in_the_order_of_the_lines(
    source, tmp_path, ray_environment
):
    alone, on_ray = tmp_path / "alone.jsonl", tmp_path / "ray.jsonl"

    run("batch", "quire-tiny", source, alone, *QUICK)
    done = run("batch", "quire-tiny", source, on_ray, *QUICK, *ON_RAY)

    assert outputs(on_ray) == sorted(outputs(alone))
    assert done.returncode == 1  # the output has an error record
    assert "error records: 1 of" in done.stderr


def test_a_killed_batch_resumes(source, tmp_path, ray_environment):
    target = tmp_path / "out.jsonl"
    arguments = ("batch", "quire-tiny", source, target, *QUICK, *ON_RAY)
    process = subprocess.Popen(quire_command(*arguments), stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + START_S
    while not (target.exists() and target.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = target.read_bytes().count(b"\n")

    run(*arguments)

    records = read_records(target)
    assert 3 < before < NUM_LINES - 1
    assert [record["line"] for record in records] == [
        number for number in range(1, NUM_LINES + 1) if number != 21
    ]
    assert run(*arguments).returncode == 1  # nothing is left to run
    assert read_records(target) == records


def test_the_actor_in_a_dataset_of_a_user(local_ray):
    prompts = [{"id": str(n), "prompt": f"<|doc|>Story {n}", "number": n + 1} for n in range(12)]
    dataset = local_ray.data.from_items(prompts).map_batches(
        BatchActor,
        batch_size=4,
        fn_constructor_kwargs={
            "model": "quire-tiny",
            "options": {"dtype": "float32", "kv": KVConfig(memory="8MiB"), "verify": False},
            "seed": 3,
        },
        num_cpus=0.5,
        compute=local_ray.data.ActorPoolStrategy(size=2),
    )

    records = [json.loads(row[RECORD]) for row in dataset.take_all()]

    assert sorted(int(record["id"]) for record in records) == list(range(12))
    assert all(record["line"] == int(record["id"]) + 1 for record in records)
    assert np.mean([record["usage"]["completion_tokens"] for record in records]) > 1
