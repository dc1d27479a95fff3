"""Output of `--json`: standard output has one JSON object, and texts go to standard error."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TextIO

_STDOUT: ContextVar[TextIO | None] = ContextVar("quire_stdout", default=None)


@contextlib.contextmanager
def json_only(*, enabled: bool) -> Iterator[None]:
    """Send what the block prints to standard error, except `print_json`.

    Args:
        enabled: whether `--json` is given; otherwise nothing changes.
    """
    if not enabled:
        yield
        return
    token = _STDOUT.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _STDOUT.reset(token)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON on standard output."""
    stream = _STDOUT.get() or sys.stdout
    stream.write(json.dumps(value) + "\n")
    stream.flush()
