"""Ranks in lockstep: rank 0 takes the calls of users, and all ranks make the same calls.

    rank 0     submit ──▶ step: schedule ─ agree ─ forward ─ sample ─▶ tokens
                 │          │                 ▲       ║         │
    others     submit     step: schedule ─ digest ─ forward ─ tokens

Every rank runs the whole engine, with its own heads. Rank 0 sends each call before it makes the
call itself. Decisions that depend on time or on random numbers are made on rank 0 and sent.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from quire.errors import InvariantError, QuireError, RankFailed
from quire.parallel.processes import Messages

DEFAULT_TIMEOUT_S = 120.0
"""Default of the maximum time in seconds that a rank waits for the others in a step."""

T = TypeVar("T")
Call = tuple[str, float, tuple[Any, ...]]
"""Name of an engine's method, time in seconds on the clock of rank 0, arguments."""


@runtime_checkable  # for the type checks in tests
class Lockstep(Protocol):
    """What an engine does so that all ranks take the same decisions."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def failure(self) -> QuireError | None:
        """The error that has ended the engine; None while it runs."""
        ...

    def now_s(self) -> float:
        """Return the time of the current call in seconds, the same on all ranks."""
        ...

    def call(self, name: str, *arguments: object) -> None:
        """Make the other ranks call this method of their engine."""
        ...

    def agree(self, digest: int) -> None:
        """Check that all ranks planned the same step."""
        ...

    def same(self, compute: Callable[[], T]) -> T:
        """What rank 0 computes; the other ranks do not compute it."""
        ...

    def fail(self, error: BaseException) -> BaseException:
        """Handle an error inside a step; return the error to raise."""
        ...

    def close(self) -> None:
        """End the other ranks."""


class Alone:
    """An engine with one rank."""

    size, failure = 1, None

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock()

    def call(self, name: str, *arguments: object) -> None: ...

    def agree(self, digest: int) -> None: ...

    def same(self, compute: Callable[[], T]) -> T:
        return compute()

    def fail(self, error: BaseException) -> BaseException:
        """See `Lockstep.fail`: the step can be repeated."""
        return error

    def close(self) -> None: ...


@runtime_checkable  # for the type checks in tests
class OtherRanks(Protocol):
    """The ranks from 1 on, as rank 0 sees them."""

    @property
    def channels(self) -> Sequence[Messages]:
        """A channel to each of them, in the order of the ranks."""
        ...

    def failure(self, seen: BaseException) -> QuireError:
        """The error that names the rank whose failure ended the others."""
        ...

    def close(self) -> None:
        """End all of them."""


class Leader:
    """Rank 0; see `Lockstep`."""

    def __init__(
        self,
        others: OtherRanks,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._others, self._timeout_s, self._clock = others, timeout_s, clock
        self._now_s = clock()
        self.size = 1 + len(others.channels)
        self.failure: QuireError | None = None

    def now_s(self) -> float:
        return self._now_s

    def call(self, name: str, *arguments: object) -> None:
        if self.failure is not None:
            raise self.failure
        self._now_s = self._clock()
        self._send((name, self._now_s, arguments))

    def agree(self, digest: int) -> None:
        for rank, channel in enumerate(self._others.channels, start=1):
            try:
                found = channel.receive(self._timeout_s)
            except RankFailed as error:
                raise self.fail(error) from error
            if found != digest:
                raise InvariantError(
                    f"rank {rank} planned another step than rank 0 (digest {found}, expected "
                    f"{digest}); restart the engine with one rank, and please report this"
                )

    def same(self, compute: Callable[[], T]) -> T:
        found = compute()
        self._send(found)
        return found

    def _send(self, message: object) -> None:
        try:
            for channel in self._others.channels:
                channel.send(message)
        except RankFailed as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> BaseException:
        """See `Lockstep.fail`: the other ranks cannot repeat the step, so the engine ends."""
        if self.failure is None:
            found = self._others.failure(error) if isinstance(error, RankFailed) else None
            self._others.close()
            self.failure = found or RankFailed(
                f"a step of the tensor-parallel engine failed with {type(error).__name__}: "
                f"{error}; restart the engine"
            )
            if found is None:
                return error
        return self.failure if isinstance(error, RankFailed) else error

    def close(self) -> None:
        if self.failure is None:
            self.failure = RankFailed("the ranks of this engine have ended: it was closed")
        self._others.close()


class Follower:
    """A rank from 1 on; see `Lockstep`."""

    failure = None

    def __init__(self, channel: Messages, size: int) -> None:
        self._channel, self.size = channel, size
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def next_call(self) -> tuple[str, tuple[Any, ...]]:
        """The method's name and its arguments."""
        message: Call = self._channel.receive()  # type: ignore[assignment]
        name, self._now_s, arguments = message
        return name, arguments

    def call(self, name: str, *arguments: object) -> None:
        """See `Lockstep.call`: only rank 0 passes calls on."""

    def agree(self, digest: int) -> None:
        """See `Lockstep.agree`: rank 0 compares."""
        self._channel.send(digest)

    def same(self, compute: Callable[[], T]) -> T:
        del compute
        found: T = self._channel.receive()  # type: ignore[assignment]
        return found

    def fail(self, error: BaseException) -> BaseException:
        """See `Lockstep.fail`: the process reports the error and ends."""
        return error

    def close(self) -> None: ...
