"""The live progress line: shown on a terminal only, with a bounded refresh rate."""

import io
import sys
from dataclasses import replace

import pytest

from quire.cli.progress import LiveProgress
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.stats import EngineStats
from support import engines


@pytest.fixture(scope="module")
def stats() -> EngineStats:
    idle = Engine(engines.load("llama"), KVConfig(memory="64KiB")).stats()
    return replace(idle, kv_total_bytes=100, kv_used_bytes=40, num_running=3, num_waiting=5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_kv_memory_use_and_completed_requests(monkeypatch, stats):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")

    with LiveProgress("batch", 9, refresh_s=0.0) as live:
        live.show(2, lambda: stats)

    assert "2/9" in screen.getvalue()
    assert "KV 40%, 3 running, 5 waiting" in screen.getvalue()


def test_without_a_terminal_no_line_is_shown_and_no_stats_are_read(monkeypatch):
    not_a_terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", not_a_terminal)
    reads = []

    with LiveProgress("batch", 9) as live:
        live.show(2, lambda: reads.append(1))

    assert (not_a_terminal.getvalue(), reads) == ("", [])


def test_stats_are_read_at_max_a_few_times_per_second(monkeypatch, stats):
    monkeypatch.setattr(sys, "stderr", Terminal())
    reads = []

    def read() -> EngineStats:
        reads.append(1)
        return stats

    with LiveProgress("batch", 9) as live:
        for _ in range(1000):
            live.show(2, read)

    assert len(reads) <= 3
