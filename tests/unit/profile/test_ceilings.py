"""Measurement of ceilings: counted bytes and FLOPs, and completeness."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.plan.ceilings import Machine
from quire.profile import ceilings
from quire.profile.ceilings import (
    QUICK_PROFILE,
    MemoryProbe,
    ProductProbe,
    measure_ceilings,
    touched_buffer,
)

MACHINE = Machine(cpu="a processor", threads=1, torch="2.13.0")


@pytest.fixture
def half_seconds(monkeypatch: pytest.MonkeyPatch):
    """Every call takes half a second."""

    def elapsed(call: Callable[[], object]) -> float:
        call()
        return 0.5

    monkeypatch.setattr(ceilings, "seconds", elapsed)


@pytest.mark.usefixtures("half_seconds")
def test_rates_of_half_second_calls():
    """1,024 B read in 0.5 s; 512 B copied; 2 * 3 * 5 * 7 = 210 FLOPs: each twice in a second."""
    probe = MemoryProbe(1024)

    assert probe.read_rate() == 2048
    assert probe.copy_rate() == 1024
    assert ProductProbe("float32", 3, 5, 7).rate() == 420


def test_every_configured_rate_is_measured():
    messages: list[str] = []
    found = measure_ceilings(QUICK_PROFILE, MACHINE, progress=messages.append)

    shapes = {(p.dtype, p.rows, p.inner, p.columns) for p in found.products}
    assert shapes == {(d, r, 256, 256) for d in ("bfloat16", "float32") for r in (1, 32)}
    assert found.machine == MACHINE
    for rate in (found.read_bytes_per_s, found.copy_bytes_per_s):
        assert rate > 0
    assert found.copies["cpu"].out.bytes_per_s > 0
    swaps = 2 * len(QUICK_PROFILE.swap_bytes) * len(found.copies)
    assert len(messages) == 1 + len(found.products) + swaps


def test_rate_is_the_median_without_the_first_call(monkeypatch: pytest.MonkeyPatch):
    """Times 100 (not counted), 1, 2, 9: the median is 2 s for 16 B."""
    times = iter([100.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(ceilings, "seconds", lambda _call: next(times))
    config = replace(QUICK_PROFILE, repeats=3)

    assert ceilings.median_rate(MemoryProbe(16).read_rate, config) == 8.0


def test_touched_buffer_is_written():
    assert touched_buffer(4096).tolist() == [1] * 4096
