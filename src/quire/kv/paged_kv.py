"""The paged KV of a device: page bytes, page tables as tensors, the lane group of each layer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.codecs.registry import make_codec
from quire.kernels.backend import AttentionBackend, ChainBackend, LayerPages, ScoringBackend
from quire.kernels.coded import CodedPlanes, decoded_slot_bytes
from quire.kv.coded_layers import CodedLayers, MeasuredConstants
from quire.kv.flat_batch import DeviceTable
from quire.kv.memory import KVMemory
from quire.kv.offload_port import EngineOffload
from quire.kv.statistics import StatisticPages, SumsScratch
from quire.kv.store import PageStore, store_of
from quire.kv.token_precision import full_precision_buffers, promoted_buffers
from quire.layout.pages import INDEX, KEY, NUMBERS, CacheLayout, LaneGroup, PageClass


@dataclass(slots=True)
class PageReads:
    """Pages of KV heads in the decode steps of requests with sparse attention, all layers.

    Attributes:
        read: pages that attention has read.
        held: pages that it would have read without sparse attention.
    """

    read: int = 0
    held: int = 0


class PagedKV:
    """The device side of a `KVMemory`: page bytes, page tables as tensors, the place of each layer.

    The place of a layer without lanes is that of the layer whose lanes it reads; `readers` numbers
    the layers that read the same lanes, the owner first.

    Nothing here but `page_reads` changes with a step: what a step leaves for the next is its
    caller's `LastStep`.

    Args:
        memory: bookkeeping; its store is `store`.
        measured: measured constants of codecs that need them.
        offload: KV offload; None if all KV is in the arena.
        pre_rope: attention of rows whose keys are stored before RoPE, beside rows with keys after
            RoPE; None if all rows store keys in the same form.
    """

    def __init__(
        self,
        memory: KVMemory,
        store: PageStore,
        backend: AttentionBackend,
        measured: MeasuredConstants | None = None,
        *,
        offload: EngineOffload | None = None,
        pre_rope: AttentionBackend | None = None,
    ) -> None:
        self.memory, self.store, self.backend = memory, store, backend
        self.pre_rope = pre_rope
        self.chains = backend if isinstance(backend, ChainBackend) else None
        self.coded = CodedLayers(store, measured)
        self.tables = {
            name: DeviceTable(table, store.device) for name, table in memory.tables.items()
        }
        self.place = {
            layer: (group, index)
            for group in memory.layout.groups
            if not group.private
            for index, layer in enumerate(group.layers)
        }
        self.states = {
            layer: (group, index)
            for group in memory.layout.groups
            if group.state is not None
            for index, layer in enumerate(group.layers)
        }
        self.state_planes = {
            group.name: {
                plane.name: CodedPlanes(
                    make_codec(plane.codec, plane.width),
                    store.views(group.page_class).planes[plane.name],
                )
                for plane in group.page_class.planes
            }
            for group in memory.layout.groups
            if group.state is not None
        }
        self.readers = dict.fromkeys(self.place, 0)
        of = Counter[int]()
        for layer, source in memory.layout.shared:
            of[source] += 1
            self.place[layer], self.readers[layer] = self.place[source], of[source]
        self.statistics = self._statistics()
        self.full_precision = full_precision_buffers(memory, store, self.tables)
        self.promoted = promoted_buffers(memory, store, self.tables)
        self.sums_scratch, self.page_reads = SumsScratch(store.device), PageReads()
        self.offload = offload

    def add_groups(self, groups: Sequence[LaneGroup]) -> None:
        """Add private lane groups of statistics, which only later sequences can use.

        Raises:
            ConfigError: the store reserves lanes in advance, or a page is larger than a slab.
        """
        self.memory.add_groups(groups)
        for group in groups:
            self.tables[group.name] = DeviceTable(self.memory.tables[group.name], self.store.device)
        self.statistics = self._statistics()

    @property
    def rotated(self) -> bool:
        """Whether all layers store keys after RoPE; otherwise all layers store keys before RoPE."""
        return all(group.page_class.rotated for group, _ in self.place.values())

    @property
    def joined(self) -> bool:
        """Whether a layer stores latents."""
        return any(group.page_class.joined for group, _ in self.place.values())

    @property
    def peak_scratch_bytes(self) -> int:
        """Peak scratch bytes outside the arena: backend, column sums, staged activations (X)."""
        staged = 0 if self.offload is None else self.offload.staging_bytes
        other = 0 if self.pre_rope is None else self.pre_rope.peak_scratch_bytes
        return self.backend.peak_scratch_bytes + other + self.sums_scratch.num_bytes + staged

    def coded_plane(self, group: LaneGroup, plane: str) -> CodedPlanes | None:
        """The codec of keys or values; that of the first layer if layers have own constants."""
        coded = self.coded.of(group.page_class, group.layers[0])
        return None if coded is None else coded.key if plane == KEY else coded.value

    def scoring(self, group: LaneGroup, plane: str) -> ScoringBackend | None:
        """The backend if it scores the tokens of a group from its pages of keys or values."""
        if group.name in self.full_precision or group.name in self.promoted:
            return None
        if group.page_class.joined and plane == KEY:  # the backend reads keys of one plane
            return None
        found, pages = self.backend, self.store.views(group.page_class).planes[plane][0]
        if not isinstance(found, ScoringBackend):
            return None
        return found if found.can_score(pages, self.coded_plane(group, plane)) else None

    def _statistics(self) -> dict[str, list[StatisticPages]]:
        places: dict[str, list[StatisticPages]] = {}
        for group in self.memory.layout.groups:
            if group.statistic is not None:
                of, _ = self.place[group.layers[0]]
                place = StatisticPages(
                    group=group,
                    statistic=group.statistic,
                    numbers=self.store.views(group.page_class).planes[NUMBERS][0],
                    table=self.memory.tables[group.name],
                    device_table=self.tables[group.name],
                    readers=of.readers,
                )
                places.setdefault(of.name, []).append(place)
        return places

    def pages_of_layers(
        self, group: LaneGroup, table: Tensor, rows: Tensor
    ) -> tuple[LayerPages, ...]:
        views = self.store.views(group.page_class)
        return tuple(
            LayerPages(
                key=views.key,
                value=views.value,
                table=table,
                rows=rows,
                first_lane=index * group.lanes_per_layer,
                num_lanes=group.lanes_per_layer,
                positions=views.positions,
                coded=self.coded.of(group.page_class, layer),
                index=views.planes[INDEX][0] if INDEX in views.planes else None,
                bounds=views.bounds,
            )
            for index, layer in enumerate(group.layers)
        )


def allocate_kv(
    layout: CacheLayout,
    total_bytes: int,
    max_rows: int,
    *,
    device: torch.device,
    backend: AttentionBackend,
    measured: MeasuredConstants | None = None,
) -> PagedKV:
    """Allocate a KV memory on a device.

    Raises:
        ConfigError: the arena cannot hold one sequence of one token.
    """
    memory = KVMemory(
        layout,
        total_bytes,
        max_rows,
        store=partial(PageStore, device=device, mover=backend.move),
        track_changes=device.type != "cpu",
    )
    return PagedKV(memory, store_of(memory), backend, measured)


def slot_bytes_of(page_class: PageClass) -> int:
    """Return the bytes of a slot that a backend reads, decoded if pages are coded."""
    if page_class.is_plain:
        return page_class.page_bytes // page_class.tokens
    return decoded_slot_bytes(page_class.heads, (page_class.head_dim, page_class.value_dim))
