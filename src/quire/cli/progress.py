"""Progress lines on standard error; disabled without a terminal."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from quire.engine.stats import EngineStats

REFRESH_S = 0.2
_MIN_BAR_COLUMNS = 120


class CountProgress:
    """A progress line on standard error; disabled if standard error is not a terminal."""

    def __init__(self, title: str, total: int, *, refresh_s: float = REFRESH_S) -> None:
        self._refresh_s = refresh_s
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=24)] if console.width >= _MIN_BAR_COLUMNS else []),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, numbers="")
        self._start_s = self._shown_s = time.monotonic()

    def __enter__(self) -> "CountProgress":
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def count(self, done: int) -> None:
        if self._is_due():
            self._progress.update(self._task, completed=done)

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        if self._progress.disable or now_s - self._shown_s < self._refresh_s:
            return False
        self._shown_s = now_s
        return True


class LiveProgress(CountProgress):
    """The progress line of a running engine."""

    def __enter__(self) -> "LiveProgress":
        super().__enter__()
        return self

    def show(self, done: int, read: "Callable[[], EngineStats]") -> None:
        """Update the line; `read` is called at most every `refresh_s` seconds."""
        if not self._is_due():
            return
        stats = read()
        speed = stats.num_generated_tokens / (self._shown_s - self._start_s)
        used = 100 * stats.kv_held_bytes / stats.kv_total_bytes
        self._progress.update(
            self._task,
            completed=done,
            numbers=f"{speed:,.0f} tokens/s, KV {used:.0f}%, "
            f"{stats.num_running} running, {stats.num_waiting} waiting",
        )
