"""Start of a model in a command: a status line on a terminal while it loads, then what was loaded.

Both go to standard error, and only to a terminal: scripts and pipes see neither.
"""

import atexit
import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

import typer

from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.api.llm import LLM

_DUMB = "dumb"


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; a closed stream of a service is None."""
    return stream is not None and bool(stream.isatty())


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a line on standard error while the block runs; nothing without a terminal.

    A terminal that cannot move its cursor (TERM=dumb) gets the line once, without a spinner.
    """
    if not is_terminal(sys.stderr):
        yield
        return
    if os.environ.get("TERM", _DUMB) == _DUMB:
        typer.echo(f"{text} ...", err=True)
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(text)} ..."):
        yield


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import large libraries without garbage collections, which cost a tenth of the start.

    Modules stay in memory, so that collections during imports free almost nothing. Objects of new
    modules are excluded from later collections too, except the last one, when Python exits:
    extension modules such as Triton's report objects that it does not free.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
            atexit.register(gc.unfreeze)
        if enabled:
            gc.enable()


class LoadProgress:
    """The start of one model: a status line, and the time until it is loaded."""

    def __init__(self, name: str) -> None:
        self._name, self._start_s = name, time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        with status(f"loading {self._name}"):
            yield

    def report(self, llm: "LLM") -> None:
        if is_terminal(sys.stderr):
            seconds = time.monotonic() - self._start_s
            width = shutil.get_terminal_size().columns
            text = f"{describe(llm)}, loaded in {seconds:.1f} s"
            typer.echo(fill(text, width, break_long_words=False, break_on_hyphens=False), err=True)


def describe(llm: "LLM") -> str:
    """Model, weights, implementation of the layers and KV memory of an LLM on one line."""
    model, stats = llm.model, llm.stats()
    decoder = model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    layers = stats.model_impl and f", {stats.model_impl} layers"
    return (
        f"{model.name}: {format_size(model.weight_bytes)} of weights in {dtype} on "
        f"{decoder.device}{layers}, {format_size(stats.kv_total_bytes)} of KV memory"
    )
