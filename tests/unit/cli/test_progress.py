"""The live line: seen on a terminal, silent elsewhere, cheap for every step."""

import io
import sys
from dataclasses import replace

import pytest

from quire.cli import progress as module
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


def test_a_terminal_shows_how_full_and_how_far(monkeypatch, stats):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(module, "_REFRESH_S", 0.0)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")

    with LiveProgress("batch", 9) as live:
        live.show(2, lambda: stats)

    assert "2/9" in screen.getvalue()
    assert "KV memory 40%, 3 running, 5 waiting requests" in screen.getvalue()


def test_elsewhere_nothing_is_shown_and_nothing_is_asked(monkeypatch):
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    requested = []

    with LiveProgress("batch", 9) as live:
        live.show(2, lambda: requested.append(1))

    assert (quiet.getvalue(), requested) == ("", [])


def test_the_engine_is_asked_a_few_times_a_second_only(monkeypatch, stats):
    monkeypatch.setattr(sys, "stderr", Terminal())
    requested = []

    def read() -> EngineStats:
        requested.append(1)
        return stats

    with LiveProgress("batch", 9) as live:
        for _ in range(1000):
            live.show(2, read)

    assert len(requested) <= 3
