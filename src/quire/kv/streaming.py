"""Brings the fronts of sequences into the arena, layer by layer, while earlier layers run.

    carrier   | layer 0 | layer 1 | wait | layer 2 | wait | layer 3 |
    layers              | layer 0 | ...... layer 1 | ...... layer 2 |

A layer's bytes go to its slot of the staging, which the layer two before it has left. One carrier
does all copies, in the order in which layers run.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.hosted import HostedFronts, HostedPiece
from quire.kv.tables import SLOTS
from quire.spec.pages import CacheLayout, LaneGroup


@runtime_checkable
class Carrier(Protocol):
    """Copies one thing after another, beside whoever asks."""

    def submit(self, copy: Callable[[], None], num_bytes: int) -> "Future[None]":
        """Begin a copy behind all others; its end can be waited for, and raises what it raised.

        Args:
            copy: does it.
            num_bytes: how much that is.
        """


class ThreadCarrier:
    """A thread that copies as fast as memory lets it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="quire-carrier")

    def submit(self, copy: Callable[[], None], num_bytes: int) -> "Future[None]":
        """See `Carrier`."""
        return self._threads.submit(copy)

    def close(self) -> None:
        """End the thread behind its last copy."""
        self._threads.shutdown()


class FrontStream:
    """The fronts of the sequences of one step.

    Args:
        fronts: of all sequences.
        layout: of the memory.
        carrier: copies.
        rows: of the step.
    """

    def __init__(
        self, fronts: HostedFronts, layout: CacheLayout, carrier: Carrier, rows: Iterable[int]
    ) -> None:
        self._pool, self._carrier = fronts.pool, carrier
        self._pieces: dict[str, list[HostedPiece]] = {}
        for row in rows:
            for piece in fronts.pieces(row):
                self._pieces.setdefault(piece.group, []).append(piece)
        self._groups = {g.name: g for g in layout.groups if g.name in self._pieces}
        self._coming: dict[tuple[str, int], Future[None]] = {}
        for layer, name in self._in_order():
            if layer < SLOTS:
                self._bring(name, layer)

    def arrive(self, group: LaneGroup, layer: int) -> None:
        """Return when the front of a layer, counted inside its group, is in its slot.

        Raises:
            Exception: what the copy raised.
        """
        coming = self._coming.pop((group.name, layer), None)
        if coming is not None:
            coming.result()

    def leave(self, group: LaneGroup, layer: int) -> None:
        """A layer has attended: its slot is free for the one two behind it."""
        if group.name in self._groups and layer + SLOTS < len(group.layers):
            self._bring(group.name, layer + SLOTS)

    def settle(self) -> None:
        """Return when no copy is under way, also where a step has ended early."""
        for coming in self._coming.values():
            coming.exception()

    def _in_order(self) -> Sequence[tuple[int, str]]:
        """Layers counted inside their groups, as the model runs them."""
        of_model = [
            (layer, index, name)
            for name, group in self._groups.items()
            for index, layer in enumerate(group.layers)
        ]
        return [(index, name) for _, index, name in sorted(of_model)]

    def _bring(self, name: str, layer: int) -> None:
        page_class, pieces = self._groups[name].page_class, self._pieces[name]
        slot = layer % SLOTS
        pages = sum(piece.staging[slot].size for piece in pieces)

        def copy() -> None:
            for piece in pieces:
                numbers = np.ascontiguousarray(piece.staging[slot].reshape(-1))
                self._pool.load(piece.layers[layer], page_class, numbers)
            self._pool.copies.wait()

        num_bytes = pages * page_class.page_bytes
        self._coming[name, layer] = self._carrier.submit(copy, num_bytes)


class Hosting:
    """Fronts on the host and who brings them, for the steps of an engine.

    Args:
        fronts: of all sequences.
        layout: of the memory.
        carrier: copies.
    """

    def __init__(self, fronts: HostedFronts, layout: CacheLayout, carrier: Carrier) -> None:
        self.fronts = fronts
        fronts.settle = self._settle
        self._last: FrontStream | None = None
        self._layout, self._carrier = layout, carrier

    def stream(self, rows: NDArray[np.int64]) -> FrontStream | None:
        """What a step of these rows brings; None where all of their KV is in the arena."""
        some = [row for row in rows.tolist() if self.fronts.pieces(row)]
        self._settle()
        self._last = None
        if some:
            self._last = FrontStream(self.fronts, self._layout, self._carrier, some)
        return self._last

    def _settle(self) -> None:
        if self._last is not None:
            self._last.settle()
