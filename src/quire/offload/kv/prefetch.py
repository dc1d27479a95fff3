"""Prefetches the offloaded prefixes of a step layer by layer, while earlier layers run.

    transfer  | layer 0 | layer 1 | wait | layer 2 | wait | layer 3 |
    layers              | layer 0 | ...... layer 1 | ...... layer 2 |

With two staging slots, the copy of layer n starts after the attention of layer n - 2; with one
slot, after that of layer n - 1. After the last layers, the first layers of the next step are loaded
(see `staging`). One transfer worker runs all copies, in the order of the step's schedule.
Activations that recompute needs are copied before the KV of their layer (see `kv_recompute`).

Of rows with sparse attention only the first layers, which read all pages, are prefetched (see
`hot_pages`). The first layer of the next step is then loaded in parts while the other layers run:
their own pages need not wait for all of it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from quire.kv.pages import PageNumbers
from quire.layout.layout import SLOTS
from quire.layout.pages import CacheLayout, LaneGroup
from quire.offload.kv.offloaded_prefixes import OffloadedPageGroup, OffloadedPrefixes
from quire.offload.kv.prefix_splits import Share
from quire.offload.step_log import ATTEND, KV_IN, LAYER, Excluded, StepLog
from quire.offload.swap.transfer import Transfer, TransferWorker


@runtime_checkable
class GroupRecompute(Protocol):
    """Recompute of a part of a group; see `quire.offload.recompute.kv_recompute`."""

    def prefetch(
        self, index: int, submit: Callable[[str, int, int, int, Callable[[], None]], Transfer]
    ) -> None:
        """Start the transfer of the activations of a layer, unless it was loaded ahead."""
        ...

    def prefetch_ahead(
        self, index: int, submit: Callable[[str, int, int, int, Callable[[], None]], Transfer]
    ) -> None:
        """Start the transfer of the activations of a layer for the next step."""
        ...

    def unfinished(self) -> Sequence[Transfer]:
        """Copies that no call has waited for."""
        ...


@runtime_checkable
class WeightWaits(Protocol):
    """Offloaded weights of the model, as `quire.offload.weights.placement` prefetches them."""

    @property
    def stalled_s(self) -> float:
        """Time that computation has waited for weights so far in seconds."""


class PrefixPrefetch:
    """Prefetch of the offloaded prefixes of one step.

    Args:
        prefixes: offloaded prefixes of all sequences.
        layout: layout of the KV memory.
        transfer_worker: runs the copies.
        shares: split of each offloaded prefix of the step, by row.
        log: log of the step.
        recompute: recompute by group; its transfers run before those of KV.
        weights: offloaded weights, whose waits are no part of a layer's time; None without them.
        whole: by row and lane group, the first layers that are loaded; default: all are.
    """

    def __init__(  # noqa: PLR0913 - what the copies of a step depend on
        self,
        prefixes: OffloadedPrefixes,
        layout: CacheLayout,
        transfer_worker: TransferWorker,
        shares: Mapping[int, Share],
        log: StepLog,
        recompute: Mapping[str, GroupRecompute] | None = None,
        weights: WeightWaits | None = None,
        whole: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self._pool, self._transfer_worker, self._log = prefixes.pool, transfer_worker, log
        self._ahead = prefixes.use
        self._recompute, self._weights = recompute or {}, weights
        self._runs: dict[str, list[_Run]] = {}
        self._held: dict[str, list[OffloadedPageGroup]] = {}
        loaded = list(_distinct(prefixes, shares))
        for row, page_group in loaded:
            layers = None if whole is None else whole.get((row, page_group.group))
            own = _runs(page_group, shares[row], layers)
            self._runs.setdefault(page_group.group, []).extend(own)
            self._held.setdefault(page_group.group, []).append(page_group)
        self._groups = {g.name: g for g in layout.groups if g.name in self._runs}
        self._tokens = sum(
            page_group.columns * self._groups[page_group.group].page_class.tokens
            for _, page_group in loaded
        ) // max(1, len(self._groups))
        self._in_flight: dict[tuple[str, int], list[Transfer]] = {}
        self._ready: object | None = None

    @property
    def first_layers(self) -> Sequence[tuple[int, int, str]]:
        """(Layer of the model, index in its group, group name) of the layers to load first."""
        of_model = [
            (group.layers[index], index, name)
            for name, group in self._groups.items()
            for index in group.first_staged(SLOTS)
        ]
        return sorted(of_model)

    def begin(self, name: str, index: int) -> None:
        """Start the copies of one of the first layers."""
        for slots in range(1, SLOTS + 1):
            if index in self._groups[name].first_staged(slots):
                self._prefetch(name, index, slots)

    def begin_wait(self, group: LaneGroup, layer: int) -> None:
        """Log the end of a layer's computation, before the layer waits for its prefix."""
        if group.name in self._groups and self._log.left is not None:
            now = self._log.marks.now()
            start, before_s = self._log.left
            waited_s = self._weights_stalled_s() - before_s
            early, self._log.early = self._log.early, None
            excluded = Excluded(waited_s, early)
            self._log.add(LAYER, group.layers[layer], 1, 0, start, now, excluded)

    def wait_for(self, group: LaneGroup, layer: int) -> None:
        """Wait until the transferred pages of a layer are in their staging slot.

        Raises:
            Exception: the error of the copy.
        """
        for transfer in self._in_flight.get((group.name, layer), ()):
            transfer.result()
        self._in_flight.pop((group.name, layer), None)  # not on failure: `finalize` waits for all
        self._ready = self._log.marks.now()

    def release_slot(self, group: LaneGroup, layer: int) -> None:
        """Start the next prefetches into the slots of a layer, after its attention."""
        if group.name not in self._groups:
            return
        for slots in range(1, SLOTS + 1):
            following = group.next_staged(layer, slots)
            if following is not None:
                self._prefetch(group.name, following, slots)
            else:
                first = group.first_staged(slots)[group.staging_slot(layer, slots)]
                self._prefetch_ahead(group.name, first, slots)
        self._load_part_ahead(group, layer)
        end = self._log.marks.now()
        self._log.left = end, self._weights_stalled_s()
        if self._ready is not None:
            tokens = self._tokens
            self._log.add(ATTEND, group.layers[layer], tokens, 0, self._ready, end)

    def _weights_stalled_s(self) -> float:
        return 0.0 if self._weights is None else self._weights.stalled_s

    def finalize(self) -> None:
        """Wait until no copy is in flight; called after failed steps too."""
        for transfer in itertools.chain.from_iterable(self._in_flight.values()):
            transfer.exception()
        for recompute in self._recompute.values():
            for transfer in recompute.unfinished():
                transfer.exception()

    def _prefetch(self, name: str, layer: int, slots: int) -> None:
        """Start the copy of a layer for page groups with this number of staging slots."""
        group = self._groups[name]
        slot = group.staging_slot(layer, slots)
        own = (run for run in self._runs[name] if len(run.pages) == slots)
        runs = [run for run in own if run.layers is None or layer < run.layers]
        if name in self._recompute and slots == SLOTS:
            self._recompute[name].prefetch(layer, self._submit)
        in_flight = self._in_flight.setdefault((name, layer), [])
        if layer in group.first_staged(slots):
            held = (group for group in self._held[name] if group.slots == slots)
            ahead = {id(group): self._ahead.take(group, layer) for group in held}
            in_flight += [copy for copies in ahead.values() for copy in copies.values()]
            runs = [run for run in runs if run.place(slot) not in ahead[id(run.page_group)]]
        pages = sum(run.pages[slot].size for run in runs)
        if not pages:
            return
        tokens = pages // group.lanes_per_layer * group.page_class.tokens
        num_bytes = pages * group.page_class.page_bytes
        copy = self._copy_of(group, layer, slot, runs)
        in_flight.append(self._submit(KV_IN, group.layers[layer], tokens, num_bytes, copy))

    def _prefetch_ahead(self, name: str, layer: int, slots: int) -> None:
        """Start the copy of one of the first layers for the next step, with the same split."""
        if name in self._recompute and slots == SLOTS:
            self._recompute[name].prefetch_ahead(layer, self._submit_ahead)
        runs = (run for run in self._runs[name] if len(run.pages) == slots)
        self._load_ahead(self._groups[name], layer, [run for run in runs if run.layers is None])

    def _load_part_ahead(self, group: LaneGroup, layer: int) -> None:
        """After a layer, start to load a part of the first one of rows with sparse attention."""
        runs, num_layers = self._runs[group.name], len(group.layers)
        part = list[_Run]()
        for number, run in enumerate(runs):
            if run.layers and layer >= run.layers - 1:
                parts = num_layers - run.layers
                if layer - run.layers + 1 == number * parts // len(runs):
                    part.append(run)
        self._load_ahead(group, 0, part)

    def _load_ahead(self, group: LaneGroup, layer: int, runs: "Sequence[_Run]") -> None:
        slot = group.staging_slot(layer, SLOTS)
        pages = sum(run.pages[slot].size for run in runs)
        if pages:
            num_bytes = pages * group.page_class.page_bytes
            copy = self._copy_of(group, layer, slot, runs)
            transfer = self._transfer_worker.submit(copy, num_bytes)
            for run in runs:
                self._ahead.add(run.page_group, layer, run.place(slot), transfer)

    def _copy_of(
        self, group: LaneGroup, layer: int, slot: int, runs: "Sequence[_Run]"
    ) -> Callable[[], None]:
        """Copy of runs of a layer to its staging slot."""

        def copy() -> None:
            for run in runs:
                space = run.page_group.host.layers[layer]
                self._pool.load(space, group.page_class, run.pages[slot], run.first)

        return copy

    def _submit_ahead(
        self, kind: str, layer: int, tokens: int, num_bytes: int, copy: Callable[[], None]
    ) -> Transfer:
        """Start a copy of the next step, which the log of this step leaves out."""
        return self._transfer_worker.submit(copy, num_bytes)

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
    """Neighbouring pages of one lane of a page group, in every layer.

    Args:
        page_group: the page group.
        lane: index of the lane in its layer.
        columns: page columns of the sequence.
        layers: first layers in which they are loaded; None: all.
    """

    def __init__(
        self, page_group: OffloadedPageGroup, lane: int, columns: range, layers: int | None
    ) -> None:
        self.page_group, self.layers = page_group, layers
        self.first = page_group.place(lane, columns.start)
        selected = slice(columns.start - page_group.first, columns.stop - page_group.first)
        self.pages: list[PageNumbers] = [
            np.ascontiguousarray(pages) for pages in page_group.staging[:, lane, selected]
        ]

    def place(self, slot: int) -> tuple[int, int]:
        """First page, counted in a layer, and number of pages in a staging slot."""
        return self.first, int(self.pages[slot].size)


def _distinct(
    prefixes: OffloadedPrefixes, shares: Mapping[int, Share]
) -> Iterator[tuple[int, OffloadedPageGroup]]:
    """Yield each page group once, with the first row that holds it."""
    seen: set[int] = set()
    for row in shares:
        for page_group in prefixes.page_groups(row):
            if id(page_group) not in seen:
                seen.add(id(page_group))
                yield row, page_group


def _runs(page_group: OffloadedPageGroup, share: Share, layers: int | None) -> list[_Run]:
    """Runs of pages of a page group that are transferred."""
    columns = list(share.transferred(page_group.first, page_group.first + page_group.columns))
    if len(columns) == 1 and len(columns[0]) == page_group.host.columns:
        return [_Whole(page_group, layers)]
    return [
        _Run(page_group, lane, run, layers)
        for lane in range(page_group.staging.shape[1])
        for run in columns
    ]


class _Whole(_Run):
    """All pages of a page group, lane by lane."""

    def __init__(self, page_group: OffloadedPageGroup, layers: int | None) -> None:
        self.page_group, self.first, self.layers = page_group, 0, layers
        self.pages = [np.ascontiguousarray(pages.reshape(-1)) for pages in page_group.staging]
