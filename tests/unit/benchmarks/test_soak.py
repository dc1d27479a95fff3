"""Resident memory over many tokens: the benchmark's computation, and leaked Python objects."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import ARMS, SoakConfig, SoakResult, run_arm
from quire.config.kv_config import KVConfig
from support import engines

CONFIG = SoakConfig(tokens=1_000, max_num_seqs=16, prompt_tokens=24, new_tokens=32)
TESTS = Path(__file__).parents[2]
TRACED = """
import gc, json, tracemalloc
import torch
from support import engines
from benchmarks.soak import Soak, SoakConfig
from quire.config.kv_config import KVConfig
from quire.scheduler.events import EventLog

torch.set_num_threads(1)
config = SoakConfig(max_num_seqs=16, prompt_tokens=24, new_tokens=32)
found = []
for memory, evict in (("48KiB", "full"), ("32KiB", "recent:cap=16,every=4,sinks=2")):
    kv = KVConfig(memory=memory, page_tokens=4, evict=evict)
    # a small log is full at once, not after thousands of tokens
    soak = Soak(engines.load("llama"), kv, config, events=EventLog(kept=64))
    tracemalloc.start()
    left = [(0, 0)]
    for _ in range(8):
        soak.generate(500)
        soak.finish()
        gc.collect()
        left.append((tracemalloc.get_traced_memory()[0], soak.generated_tokens))
    tracemalloc.stop()
    grown = [(a - c) / (b - d) for (a, b), (c, d) in zip(left[1:], left)]
    preemptions = soak.engine.scheduler.num_preemptions
    found.append({"bytes_per_token": grown, "preemptions": preemptions})
print(json.dumps(found))
"""
MIN_OBJECT_BYTES = 24  # size of one float per token


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def result(samples) -> SoakResult:
    return SoakResult("everything", 0, 0, 0, tuple(samples))


def test_leak_has_its_rate_as_slope():
    leaking = result((n, 1_000_000 + 32 * n) for n in range(0, 1_000, 10))

    assert leaking.slope_bytes_per_token == pytest.approx(32)
    assert (
        leaking.growth_bytes == 32 * 900
    )  # from the middle of the first tenth to that of the last
    assert leaking.growth_fraction == pytest.approx(32 * 900 / 1_000_000)


def test_single_large_sample_is_not_growth():
    samples = [(n, 1_000) for n in range(100)]
    samples[97] = (97, 10**9)

    assert result(samples).growth_bytes == 0


@pytest.mark.slow
def test_generated_tokens_leave_no_python_objects():
    """The measurement runs in a separate process, because type checks of tests keep objects."""
    ran = subprocess.run(
        [sys.executable, "-c", TRACED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
    )
    found = json.loads(ran.stdout)

    assert len(found) == 2
    for arm in found:
        settled = arm["bytes_per_token"][4:]  # in the first rounds Python fills its free lists
        assert arm["preemptions"] > 0
        assert statistics.median(settled) < MIN_OBJECT_BYTES / 2, arm


def test_run_samples_memory_and_frees_every_page(model, monkeypatch):
    monkeypatch.setitem(ARMS, "everything", KVConfig(memory="48KiB", page_tokens=4))
    found = run_arm("everything", model, CONFIG)

    assert found.generated_tokens >= CONFIG.tokens / 2
    assert found.preemptions > 0
    assert len(found.samples) > 50
    tokens = [tokens for tokens, _ in found.samples]
    assert tokens == sorted(tokens)
