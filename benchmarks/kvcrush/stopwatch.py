"""A stopwatch around the methods of eviction rules, for as long as a bench runs.

Time is charged to the innermost phase that is open, so phases add up. The methods are wrapped on
their classes and put back: nothing in the engine knows of it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from quire.eviction.eviction import PolicyEvictor
from quire.policies.base import EvictionPolicy, ScorePolicy
from quire.policies.crushed import Asked
from quire.policies.kmeans import KMeans
from quire.policies.kvcrush import KVCrush

COMPACTION, SCORING, SELECTION = "compaction", "scoring", "selection"
SIGNATURES, REPRESENTATIVES = "signatures", "representatives"
PHASES = (SCORING, SELECTION, SIGNATURES, REPRESENTATIVES, COMPACTION)
"""Of an eviction: the base rule's scores; what stays by them; bits; distances and buckets (or
clusters); views, tables and moves, which every rule needs."""

_WATCHED: tuple[tuple[type, str, str], ...] = (
    (PolicyEvictor, "evict", COMPACTION),
    (ScorePolicy, "checked_score", SCORING),
    (EvictionPolicy, "decide", SELECTION),
    (KVCrush, "decide", SELECTION),
    (Asked, "signatures", SIGNATURES),
    (KVCrush, "represent", REPRESENTATIVES),
    (KMeans, "represent", REPRESENTATIVES),
)


class Stopwatch:
    """Seconds by phase.

    Args:
        clock: seconds.

    Attributes:
        seconds: of each phase, those of phases inside it taken off.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge what is done inside to a phase."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now_s = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


@contextmanager
def watched_rules(watch: Stopwatch) -> Iterator[None]:
    """Let a stopwatch run in the phases of all evictions of this process."""
    with ExitStack() as stack:
        for owner, method, phase in _WATCHED:
            stack.enter_context(_wrapped(owner, method, phase, watch))
        yield


@contextmanager
def _wrapped(owner: type, method: str, phase: str, watch: Stopwatch) -> Iterator[None]:
    original: Callable[..., Any] = vars(owner)[method]

    @wraps(original)
    def timed(*arguments: Any, **options: Any) -> Any:
        with watch.phase(phase):
            return original(*arguments, **options)

    setattr(owner, method, timed)
    try:
        yield
    finally:
        setattr(owner, method, original)
