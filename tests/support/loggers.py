import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_loggers() -> Iterator[None]:
    """Undo the configuration of loggers by a server that runs in this process."""
    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn.error")]
    before = [(each.handlers, each.level, each.propagate) for each in loggers]
    try:
        yield
    finally:
        for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
