"""Calls into third-party code: Transformers, and the Python code of model folders.

The exceptions that such code raises for an unusual config or a damaged file are not part of its
interface. Every exception becomes a ModelError of one line, with the original as its cause.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from quire.errors import ModelError, QuireError

_LONGEST_REASON = 300  # characters
_CLEAR_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    StrictDataclassError,
)  # their texts are clear without the class name


@contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Convert exceptions of the block to a ModelError that begins with `what`."""
    try:
        yield
    except QuireError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{what}: {reason(error)}") from error


@contextmanager
def held_warnings() -> Iterator[None]:
    """Hold Transformers' log records of this thread until the block ends.

    If the block raises, the records are dropped: the exception describes the problem.
    """
    handlers = list(logging.getLogger("transformers").handlers)
    held = _Held(threading.get_ident())
    for handler in handlers:
        handler.addFilter(held)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(held)
    for handler in handlers:
        for record in held.records:
            handler.handle(record)


class _Held(logging.Filter):
    def __init__(self, thread: int) -> None:
        super().__init__()
        self._thread = thread
        self.records: dict[logging.LogRecord, None] = {}  # in order, once for all handlers

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.records[record] = None
        return False


def reason(error: BaseException) -> str:
    """The text of an exception on one line, with its class name if the text alone is unclear."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_REASON:
        text = f"{text[: _LONGEST_REASON - 3]}..."
    if text and isinstance(error, _CLEAR_ERRORS):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
