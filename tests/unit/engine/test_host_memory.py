"""Freed CPU memory: retained for the next step if the C library supports it; no objects stay.

Settings of the C library apply to the whole process, so cases that change them run in a process
of their own.
"""

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import quire.engine.core
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.kernels.memory import keep_freed_memory
from support import engines

M_MMAP_THRESHOLD = -3  # malloc.h
TESTS = Path(__file__).parents[2]
IS_GLIBC = platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
STEPS = """
import json, resource, sys, threading
import psutil, torch

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    from quire.kernels.memory import keep_freed_memory

    assert keep_freed_memory().kept
found = {}

def step(block_bytes):
    torch.empty(block_bytes, dtype=torch.uint8).fill_(1)

def run():
    for i in range(200):
        step((24 << 20) >> (i % 4))
        if i == 100:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found["rss_bytes"] = psutil.Process().memory_info().rss
    found["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    found["growth_bytes"] = psutil.Process().memory_info().rss - found["rss_bytes"]

if sys.argv[2] == "thread":
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
print(json.dumps(found))
"""


def measure(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, cwd=TESTS).stdout)


@needs_glibc
@pytest.mark.parametrize("thread", ["main", "thread"])
def test_steps_cause_few_page_faults_and_the_heap_does_not_grow(thread):
    measured = measure(STEPS, "keep", thread)
    assert measured["faults"] < 1_000
    assert measured["growth_bytes"] < 1 << 20


@pytest.mark.slow
@needs_glibc
def test_without_the_setting_large_blocks_cause_page_faults_in_every_step():
    """The control of the test above: page faults are measurable."""
    large = STEPS.replace("24 << 20", "80 << 20")
    assert measure(large, "return", "main")["faults"] > 100_000
    assert measure(large, "keep", "main")["faults"] < 1_000


@pytest.mark.parametrize("return_memory", [False, True])
def test_engine_on_cpu_sets_malloc_options_by_default(monkeypatch, return_memory):
    calls = []
    monkeypatch.setattr(quire.engine.core, "keep_freed_memory", lambda: calls.append(1))
    Engine(engines.load("llama"), KVConfig(memory="1MiB"), return_memory=return_memory)
    assert len(calls) == (0 if return_memory else 1)


class OldGlibc(ctypes.CDLL):
    """A stand-in for glibc before 2.35, which refuses thresholds above 32 MiB."""

    gnu_get_libc_version = None  # identifies glibc

    def __init__(self, max_threshold_bytes):
        self.max_threshold_bytes, self.options = max_threshold_bytes, {}

    def mallopt(self, option, value):
        if option == M_MMAP_THRESHOLD and value > self.max_threshold_bytes:
            return 0
        self.options[option] = value
        return 1


def use_c_library(monkeypatch, library):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)


def test_old_glibc_keeps_blocks_up_to_its_largest_threshold(monkeypatch):
    glibc = OldGlibc(32 << 20)
    use_c_library(monkeypatch, glibc)

    found = keep_freed_memory()

    assert found.kept
    assert "32 MiB" in found.explanation
    assert glibc.options[M_MMAP_THRESHOLD] == 32 << 20
    use_c_library(monkeypatch, OldGlibc(0))
    refused = keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    other = keep_freed_memory()
    assert (refused.kept, other.kept) == (False, False)
    assert "refused" in refused.explanation
    assert "only glibc" in other.explanation


MIN_OBJECT_BYTES = 24  # size of one float per token


@pytest.mark.slow
def test_generated_tokens_leave_no_python_objects():
    command = [sys.executable, "-m", "support.left_objects"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = json.loads(ran.stdout.splitlines()[-1])

    assert len(found) == 2
    for memory in found:
        settled = memory["bytes_per_token"][9:]  # until then the log of finished requests fills
        assert memory["preemptions"] > 0
        assert statistics.median(settled) < MIN_OBJECT_BYTES / 2, memory
