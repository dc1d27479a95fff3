"""Live view of `quire demo`: the KV of each running request, on a terminal only."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.cli.startup import is_terminal
from quire.engine.stats import EngineStats, RequestBytes
from quire.layout.sizes import format_size

REFRESH_S = 0.2
_HEADER_LINES = 4
_EIGHTHS = " ▏▎▍▌▋▊▉"


class LivePages:
    """Rows of running requests with a bar of their KV bytes; disabled without a terminal.

    Args:
        title: what runs.
        total: number of requests.
        cell_bytes: bytes of one character of a bar.
    """

    def __init__(self, title: str, total: int, cell_bytes: int) -> None:
        self._title, self._total, self._cell_bytes = title, total, cell_bytes
        self._console = Console(stderr=True)
        self.enabled = is_terminal(sys.stderr) and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._start_s = time.monotonic()
        self._shown_s = 0.0

    def __enter__(self) -> "LivePages":
        if self.enabled:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            self._live.stop()

    def show(self, done: int, read: Callable[[], EngineStats]) -> None:
        """Update the view, at most every `REFRESH_S` seconds; cheap enough for every step."""
        now_s = time.monotonic()
        if not self.enabled or now_s - self._shown_s < REFRESH_S:
            return
        self._shown_s = now_s
        stats = read()
        speed = stats.num_generated_tokens / max(now_s - self._start_s, REFRESH_S)
        header = (
            f"{self._title}: {done} of {self._total} requests done, {stats.num_running} running, "
            f"{stats.num_waiting} waiting\n"
            f"{speed:,.0f} tokens/s, {format_size(stats.kv_held_bytes)} of "
            f"{format_size(stats.kv_total_bytes)} of KV memory; one █ is "
            f"{format_size(self._cell_bytes)}\n"
        )
        rows = max(1, self._console.height - _HEADER_LINES)
        requests = request_rows(stats.requests, rows, self._cell_bytes, self._console.width)
        self._live.update(Group(Text(header), requests), refresh=True)


def request_rows(
    requests: tuple[RequestBytes, ...], rows: int, cell_bytes: int, width: int
) -> Table:
    """Build one row for each request: its id, its tokens and a bar of its KV bytes.

    Args:
        requests: the running requests.
        rows: most rows; the last one counts the other requests.
        cell_bytes: bytes of one character of a bar.
        width: columns of the terminal.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, overflow="crop")
    shown = requests if len(requests) <= rows else requests[: rows - 1]
    for request in shown:
        bar = Text(bar_of(request.kv_bytes, cell_bytes, width // 2), style="green")
        grid.add_row(request.request_id, f"{request.tokens} tokens", bar)
    if len(shown) < len(requests):
        grid.add_row(f"and {len(requests) - len(shown)} more", "", "")
    return grid


def bar_of(size_bytes: int, cell_bytes: int, width: int) -> str:
    """Bar of a size, at most `width` characters, in eighths of a character."""
    eighths = min(8 * width, round(8 * size_bytes / cell_bytes))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
