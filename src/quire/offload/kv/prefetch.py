"""Brings the fronts of sequences into the arena, layer by layer, while earlier layers run.

    carrier   | layer 0 | layer 1 | wait | layer 2 | wait | layer 3 |
    layers              | layer 0 | ...... layer 1 | ...... layer 2 |

A layer's bytes go to its slot of the staging, which the layer two before it has left, or the layer
before it where the staging has one slot. One carrier does all copies, in the order in which layers
run; of each layer what keys and values are made of comes first (see `remaking`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from quire.kv.pages import PageNumbers
from quire.kv.step_log import ATTEND, KV_IN, LAYER, StepLog
from quire.layout.layout import SLOTS
from quire.layout.pages import CacheLayout, LaneGroup
from quire.offload.kv.offloaded_prefixes import OffloadedPageGroup, OffloadedPrefixes
from quire.offload.kv.prefix_splits import Share
from quire.offload.swap.transfer import Transfer, TransferWorker


@runtime_checkable
class Parts(Protocol):
    """What of a group is not carried as it is; see `quire.offload.recompute.kv_recompute`."""

    def bring(
        self, index: int, submit: Callable[[str, int, int, int, Callable[[], None]], Transfer]
    ) -> None:
        """Begin to carry what a layer's keys and values are made of."""
        ...

    def unfinished(self) -> Sequence[Transfer]:
        """Copies that nobody has waited for."""
        ...


class PrefixPrefetch:
    """The fronts of the sequences of one step.

    Args:
        prefixes: of all sequences.
        layout: of the memory.
        transfer_worker: copies.
        shares: of the sequences of the step that have a front, what becomes of it.
        log: of the step.
        parts: by group, what is carried before the rest.
    """

    def __init__(
        self,
        prefixes: OffloadedPrefixes,
        layout: CacheLayout,
        transfer_worker: TransferWorker,
        shares: Mapping[int, Share],
        log: StepLog,
        parts: Mapping[str, Parts] | None = None,
    ) -> None:
        self._pool, self._transfer_worker, self._log = prefixes.pool, transfer_worker, log
        self._parts = parts or {}
        self._runs: dict[str, list[_Run]] = {}
        for row, share in shares.items():
            for piece in prefixes.pieces(row):
                self._runs.setdefault(piece.group, []).extend(_runs(piece, share))
        self._groups = {g.name: g for g in layout.groups if g.name in self._runs}
        self._tokens = sum(
            piece.columns * self._groups[piece.group].page_class.tokens
            for row in shares
            for piece in prefixes.pieces(row)
        ) // max(1, len(self._groups))
        self._coming: dict[tuple[str, int], list[Transfer]] = {}
        self._left: object | None = None
        self._ready: object | None = None
        for layer, name in self._in_order():
            for slots in range(layer + 1, SLOTS + 1):
                self._bring(name, layer, slots)

    def arriving(self, group: LaneGroup, layer: int) -> None:
        """A layer, counted inside its group, is about to wait for its front."""
        if group.name in self._groups and self._left is not None:
            now = self._log.marks.now()
            self._log.add(LAYER, group.layers[layer], 1, 0, self._left, now)

    def arrive(self, group: LaneGroup, layer: int) -> None:
        """Return when what is carried of a layer is in its slot.

        Raises:
            Exception: what the copy raised.
        """
        for coming in self._coming.get((group.name, layer), ()):
            coming.result()
        self._coming.pop((group.name, layer), None)  # kept where one fails: `settle` waits for all
        self._ready = self._log.marks.now()

    def leave(self, group: LaneGroup, layer: int) -> None:
        """A layer has attended: its slots are free for the layers that come into them next."""
        if group.name not in self._groups:
            return
        for slots in range(1, SLOTS + 1):
            if layer + slots < len(group.layers):
                self._bring(group.name, layer + slots, slots)
        self._left = self._log.marks.now()
        if self._ready is not None:
            tokens = self._tokens
            self._log.add(ATTEND, group.layers[layer], tokens, 0, self._ready, self._left)

    def finalize(self) -> None:
        """Return when no copy is under way, also where a step has ended early."""
        for coming in itertools.chain.from_iterable(self._coming.values()):
            coming.exception()
        for part in self._parts.values():
            for arrival in part.unfinished():
                arrival.exception()

    def _in_order(self) -> Sequence[tuple[int, str]]:
        """Layers counted inside their groups, as the model runs them."""
        of_model = [
            (layer, index, name)
            for name, group in self._groups.items()
            for index, layer in enumerate(group.layers)
        ]
        return [(index, name) for _, index, name in sorted(of_model)]

    def _bring(self, name: str, layer: int, slots: int) -> None:
        """Begin to copy a layer of the pieces whose staging has so many slots."""
        group, slot = self._groups[name], layer % slots
        runs = [run for run in self._runs[name] if len(run.pages) == slots]
        if name in self._parts and slots == SLOTS:
            self._parts[name].bring(layer, self._submit)
        pages = sum(run.pages[slot].size for run in runs)
        if not pages:
            return

        def copy() -> None:
            for run in runs:
                space = run.piece.layers[layer]
                self._pool.load(space, group.page_class, run.pages[slot], run.first)

        tokens = pages // group.lanes_per_layer * group.page_class.tokens
        num_bytes = pages * group.page_class.page_bytes
        coming = self._submit(KV_IN, group.layers[layer], tokens, num_bytes, copy)
        self._coming.setdefault((name, layer), []).append(coming)

    def _submit(
        self, kind: str, layer: int, tokens: int, num_bytes: int, copy: Callable[[], None]
    ) -> Transfer:
        marks, log = self._log.marks, self._log
        requested = marks.now()

        def timed() -> None:
            start = marks.begin(requested)
            copy()
            log.add(kind, layer, tokens, num_bytes, start, marks.ended())

        return self._transfer_worker.submit(timed, num_bytes)


class _Run:
    """Neighbouring pages of one lane of a piece, in every layer.

    Args:
        piece: of which.
        lane: of a layer.
        columns: of the sequence.
    """

    def __init__(self, piece: OffloadedPageGroup, lane: int, columns: range) -> None:
        self.piece = piece
        self.first = lane * piece.columns + columns.start - piece.first
        some = slice(columns.start - piece.first, columns.stop - piece.first)
        self.pages: list[PageNumbers] = [
            np.ascontiguousarray(pages) for pages in piece.staging[:, lane, some]
        ]


def _runs(piece: OffloadedPageGroup, share: Share) -> list[_Run]:
    """What is carried of a piece."""
    columns = list(share.transferred(piece.first, piece.first + piece.columns))
    if len(columns) == 1 and len(columns[0]) == piece.columns:
        return [_Whole(piece)]
    return [_Run(piece, lane, run) for lane in range(piece.staging.shape[1]) for run in columns]


class _Whole(_Run):
    """All pages of a piece, lane by lane."""

    def __init__(self, piece: OffloadedPageGroup) -> None:
        self.piece, self.first = piece, 0
        self.pages = [np.ascontiguousarray(pages.reshape(-1)) for pages in piece.staging]
