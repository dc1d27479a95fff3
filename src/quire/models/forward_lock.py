"""The lock of a model: one forward or recompute of keys and values at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class ForwardLock:
    """Held by one context: a thread, and the threads that run its forwards layer by layer.

    A thread lock alone would not do: forwards that run layer by layer have threads of their own,
    in copies of the context of the thread that holds the lock, and recompute inside attention.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held: ContextVar[bool] = ContextVar("quire-forward-lock", default=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within the block; a context that holds it already goes on at once."""
        if self._is_held.get():
            yield
            return
        with self._lock:
            token = self._is_held.set(True)
            try:
                yield
            finally:
                self._is_held.reset(token)
