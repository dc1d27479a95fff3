import re
import signal
import time
from pathlib import Path

import pytest

from support.command_line import read_records, write_lines
from support.ray_processes import QUICK, START_S, python, require_ray

pytestmark = pytest.mark.slow
require_ray()

GUIDE = Path(__file__).parents[2] / "docs/scale.md"
ON_RAY = ("--ray", "--ray-replicas=2", "--ray-cpus=0.5")
NUM_LINES, BLANK = 60, 20


def run(*arguments):
    process = python(*arguments)
    output, _ = process.communicate(timeout=2 * START_S)
    return process.returncode, output


def batch(source, target, *options):
    """Run `quire batch`; some lines have error records, so its exit status is 1."""
    status, output = run("-m", "quire", "batch", "quire-tiny", source, target, "--seed=3", *options)
    assert status == 1, output
    assert "error records: 1 of" in output
    return output


@pytest.fixture
def source(tmp_path):
    lines = [
        {"id": f"r{n}", "prompt": f"<|doc|>Story {n}", "max_tokens": 1 + n % 24}
        for n in range(NUM_LINES)
    ]
    lines[7] = {"id": "bad", "prompt": 3}
    lines[BLANK] = ""
    return write_lines(tmp_path / "in.jsonl", lines)


def outputs(path):
    return [(r["line"], r["text"], r["finish_reason"], r["error"]) for r in read_records(path)]


def test_records_are_those_of_one_engine_in_the_order_of_the_lines(source, tmp_path):
    alone, on_ray = tmp_path / "alone.jsonl", tmp_path / "ray.jsonl"
    batch(source, alone, *QUICK)
    batch(source, on_ray, *QUICK, *ON_RAY)
    assert outputs(on_ray) == sorted(outputs(alone))


def test_a_killed_batch_resumes(source, tmp_path):
    target = tmp_path / "out.jsonl"
    arguments = ("-m", "quire", "batch", "quire-tiny", source, target, "--seed=3", *QUICK, *ON_RAY)
    process = python(*arguments)
    deadline_s = time.monotonic() + START_S
    while not (target.exists() and target.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = target.read_bytes().count(b"\n")

    batch(source, target, *QUICK, *ON_RAY)

    records = read_records(target)
    wanted = [number for number in range(1, NUM_LINES + 1) if number != BLANK + 1]
    assert 3 < before < len(wanted)
    assert [record["line"] for record in records] == wanted
    batch(source, target, *QUICK, *ON_RAY)  # nothing is left to run
    assert read_records(target) == records


START = (
    "import ray\n"
    "ray.init(address='local', num_cpus=2, object_store_memory=200 * 2**20,"
    " include_dashboard=False)\n"
)


def test_the_program_of_the_guide(tmp_path):
    program = tmp_path / "program.py"
    [code] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program.write_text(f"{START}{code}\nray.shutdown()\n")
    status, output = run(program)
    assert status == 0, output
    assert set(map(int, re.findall(r"^(\d+) ", output, re.MULTILINE))) >= set(range(100))
