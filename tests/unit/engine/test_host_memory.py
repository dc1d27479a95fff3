"""Freed host memory: kept for the next step where the C library can be told to, else said so.

What the C library was told holds for a whole process, so each case has one of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quire.engine.host_memory
from quire.engine.host_memory import keep_freed_memory

TESTS = Path(__file__).parents[2]
needs_glibc = pytest.mark.skipif(
    quire.engine.host_memory._glibc() is None, reason="the C library is not glibc"
)
STEPS = """
import json, resource, sys, threading
import psutil, torch

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    from quire.engine.host_memory import keep_freed_memory

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
ENGINES = """
import sys
import torch
from support import engines
import quire.engine.core
from quire.engine.core import Engine
from quire.config.kv_config import KVConfig

called = []
quire.engine.core.keep_freed_memory = lambda: called.append(1)
Engine(engines.load("llama"), KVConfig(memory="1MiB"), return_memory=sys.argv[1] == "return")
print(len(called))
"""


def run_apart(program: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=TESTS,
    )
    return ran.stdout


@needs_glibc
@pytest.mark.parametrize("thread", ["main", "thread"])
def test_steps_take_no_fresh_pages_and_the_heap_does_not_grow(thread):
    kept = json.loads(run_apart(STEPS, "keep", thread))

    assert kept["faults"] < 1_000
    assert kept["growth_bytes"] < 1 << 20


@pytest.mark.slow
@needs_glibc
def test_without_it_blocks_over_the_libraries_own_threshold_are_taken_anew():
    """The control: otherwise the test above could not fail."""
    large = STEPS.replace("24 << 20", "80 << 20")

    assert json.loads(run_apart(large, "return", "main"))["faults"] > 100_000
    assert json.loads(run_apart(large, "keep", "main"))["faults"] < 1_000


@pytest.mark.parametrize(("requested", "calls"), [("keep", 1), ("return", 0)])
def test_an_engine_on_a_cpu_asks_for_it_unless_told_not_to(requested, calls):
    assert int(run_apart(ENGINES, requested)) == calls


def test_another_c_library_is_left_alone_and_it_is_said(monkeypatch):
    monkeypatch.setattr(quire.engine.host_memory.sys, "platform", "darwin")

    found = keep_freed_memory()

    assert not found.kept
    assert "only glibc" in found.explanation


class OldGlibc:
    """glibc before 2.35: no threshold over 32 MiB."""

    def __init__(self, most_bytes):
        self.most_bytes, self.told = most_bytes, {}

    def mallopt(self, what, value):
        if what == quire.engine.host_memory._M_MMAP_THRESHOLD and value > self.most_bytes:
            return 0
        self.told[what] = value
        return 1


def test_an_old_glibc_keeps_what_it_can(monkeypatch):
    glibc = OldGlibc(32 << 20)
    monkeypatch.setattr(quire.engine.host_memory, "_glibc", lambda: glibc)

    found = keep_freed_memory()

    assert found.kept
    assert "32 MiB" in found.explanation
    assert glibc.told[quire.engine.host_memory._M_MMAP_THRESHOLD] == 32 << 20


def test_a_c_library_that_refuses_is_said_to_refuse(monkeypatch):
    monkeypatch.setattr(quire.engine.host_memory, "_glibc", lambda: OldGlibc(0))

    found = keep_freed_memory()

    assert not found.kept
    assert "refused" in found.explanation
