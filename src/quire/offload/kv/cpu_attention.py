"""CPU attention to the last part of an offloaded prefix, in parallel with the prefetch of the rest.

    CPU      |    attention to part a   |
    link     | KV of the others  |
    device               | attention to the others and new tokens | merge by log-sum-exp

Only the partial outputs cross the link: a vector and a log-sum-exp for each head. Only decode rows
take part. Rows with sums of attention weights and codecs that keep some tokens at full precision do
not: both need the attention weights over all tokens. Recorded queries are no obstacle.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionMath, LayerPages
from quire.kernels.coded import CodedPages, decode_pages
from quire.kernels.dense import Partial, attend_partial, merge
from quire.kernels.device_copies import to_device
from quire.kernels.latent import folded
from quire.kv.coded_layers import CodedLayers
from quire.kv.flat_batch import FlatBatch
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, PageViews
from quire.kv.tables import LaneTable
from quire.layout.pages import VALUE, LaneGroup
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefix_splits import Share
from quire.offload.step_log import HOST_ATTEND, StepLog
from quire.offload.swap.host_store import DirectCopies, StagedCopies


class CPUAttention:
    """Runs attention on the CPU for the steps of an engine: one thread, one layer after another.

    Args:
        memory: block tables of the sequences.
        store: its bytes.
        coded: decodes pages.
        prefixes: offloaded prefixes of all sequences.
        groups: names of the groups whose lanes support partial attention.
    """

    def __init__(
        self,
        memory: KVMemory,
        store: PageStore,
        coded: CodedLayers,
        prefixes: OffloadedPrefixes,
        groups: Sequence[str],
    ) -> None:
        self.memory, self.store, self.coded, self.prefixes = memory, store, coded, prefixes
        self.groups = frozenset(groups)
        self.num_attended = 0  # tokens attended to on the CPU so far, counted in each layer
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="quire-host-attention")

    @property
    def host(self) -> Tensor:
        """The bytes of the offloaded prefixes."""
        copies = self.prefixes.pool.copies
        assert isinstance(copies, DirectCopies | StagedCopies), "a pool with bytes"
        return copies.host


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the step with CPU attention to a part of its offloaded prefix.

    Attributes:
        place: index of the row in the step.
        row: row of the sequence in the page tables.
        host: page columns attended to on the CPU.
        length: tokens of the sequence, which the biases of both parts are relative to.
    """

    place: int
    row: int
    host: range
    length: int


class StepCPUAttention:
    """CPU attention of one step.

    Args:
        engine: runs the attention.
        batch: batch of the step.
        shares: split of the offloaded prefixes, by row.
        log: log of the step.

    Attributes:
        places: indices of the batch's rows with CPU attention; no backend serves them.
    """

    def __init__(
        self, engine: CPUAttention, batch: FlatBatch, shares: Mapping[int, Share], log: StepLog
    ) -> None:
        self._engine, self._log = engine, log
        self._rows = [
            _Row(place, row, share.host, int(engine.memory.lengths[row]))
            for place, row in enumerate(batch.rows.tolist())
            if place < batch.shape.num_decode
            if (share := shares.get(row)) is not None and share.host
        ]
        self.places = np.array([row.place for row in self._rows], dtype=np.int64)
        self._in_flight: Future[list[Partial]] | None = None

    def serves(self, group: LaneGroup) -> bool:
        """Whether rows of the step use CPU attention in the layers of a group."""
        return bool(self._rows) and group.name in self._engine.groups

    def start(
        self,
        group: LaneGroup,
        index: int,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        math: AttentionMath,
    ) -> None:
        """Start CPU attention of a layer; `query` as for `merge_into`."""
        if not self.serves(group):
            return
        math, queries = self._queries(query, math)
        queries = queries.to("cpu", non_blocking=query.is_cuda)
        ready = torch.cuda.current_stream(query.device).record_event() if query.is_cuda else None
        plain = replace(math, sinks=None)  # sinks count once, in the final merge

        def attend() -> list[Partial]:
            if ready is not None:
                ready.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                found = [
                    self._on_host(group, index, row, one[None, :, None], plain)
                    for row, one in zip(self._rows, queries, strict=True)
                ]
            tokens = sum(len(row.host) for row in self._rows) * group.page_class.tokens
            self._engine.num_attended += tokens
            layer, end = group.layers[index], time.perf_counter()
            self._log.add(HOST_ATTEND, layer, tokens, 0, start, end)
            return found

        self._in_flight = self._engine.threads.submit(attend)

    def merge_into(
        self,
        out: Float[Tensor, "num_tokens num_heads value_dim"],
        group: LaneGroup,
        pages: LayerPages,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        math: AttentionMath,
    ) -> None:
        """Attend to the other tokens on the device and write the merged output of the rows.

        Args:
            out: output of the step.
            group: lane group of the layer.
            pages: pages of the layer, with new tokens written and offloaded pages transferred.
            query: queries of the step, after RoPE.
            math: scale, soft cap and sinks.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        table = self._engine.memory.tables[group.name]
        math, queries = self._queries(query, math)
        plain = replace(math, sinks=None)
        on_device = [
            self._on_device(table, pages, row, one[None, :, None], plain)
            for row, one in zip(self._rows, queries, strict=True)
        ]
        sinks = math.sinks
        for row, device, host in zip(self._rows, on_device, in_flight.result(), strict=True):
            on_cpu = Partial(host.out.to(out.device), host.lse.to(out.device))
            whole = merge([device, on_cpu], sinks).out[:, :, 0].to(out.dtype)
            out[row.place] = (whole if math.latent is None else math.latent.unfold(whole))[0]

    def finalize(self) -> None:
        """Wait until no CPU attention is running, also after a failed step."""
        if self._in_flight is not None:
            self._in_flight.exception()

    def _queries(self, query: Tensor, math: AttentionMath) -> tuple[AttentionMath, Tensor]:
        """Return the queries of the rows, and operations on them and on keys as pages hold them."""
        return folded(math, query[to_device(self.places, query.device)])

    # ---- location of the pages -----------------------------------------------------------------

    def _on_host(
        self, group: LaneGroup, index: int, row: _Row, query: Tensor, math: AttentionMath
    ) -> Partial:
        """Attend to the CPU part of a row in one layer."""
        by_lane = query.chunk(group.lanes_per_layer, dim=1)
        lanes: list[Partial] = []
        for lane, own in enumerate(by_lane):
            at_lane = math.of_lanes(len(by_lane), torch.tensor([lane]))
            parts = [
                self._attend(
                    views, group, index, lane, own, at_lane.at(torch.from_numpy(at), row.length)
                )
                for views, at in self._host_views(group, index, lane, row)
            ]
            lanes.append(parts[0] if len(parts) == 1 else merge(parts))
        return _side_by_side(lanes)

    def _host_views(
        self, group: LaneGroup, index: int, lane: int, row: _Row
    ) -> Iterator[tuple[PageViews, NDArray[np.int64]]]:
        """Pages of a lane with CPU attention and the positions [1, slots] in them, by segment."""
        engine, tokens = self._engine, group.page_class.tokens
        for page_group in engine.prefixes.page_groups(row.row):
            if page_group.group == group.name:
                columns = range(
                    max(page_group.first, row.host.start),
                    min(page_group.first + page_group.columns, row.host.stop),
                )
                if columns:
                    first = page_group.place(lane, columns.start)
                    space = page_group.host.layers[index]
                    stored, at = page_group.positions(tokens), columns.start
                    for start, count in engine.prefixes.pool.places(
                        space, group.page_class, first, len(columns)
                    ):
                        num_bytes = count * group.page_class.page_bytes
                        host_bytes = engine.host[start : start + num_bytes]
                        slots = np.arange(at * tokens, (at + count) * tokens)
                        if stored is not None:
                            own = stored[index * group.lanes_per_layer + lane]
                            slots = own[slots - page_group.first * tokens].astype(np.int64)
                        yield engine.store.views_of(host_bytes, group.page_class), slots[None]
                        at += count

    def _attend(
        self,
        views: PageViews,
        group: LaneGroup,
        index: int,
        lane: int,
        query: Tensor,
        math: AttentionMath,
    ) -> Partial:
        """Attend to whole pages of one lane."""
        numbers = torch.arange(len(views.whole))
        coded = self._engine.coded.of(group.page_class, group.layers[index])
        own = None
        if coded is not None and views.coded is not None:
            own = CodedPages(
                replace(coded.key, planes=views.coded.key.planes),
                replace(coded.value, planes=views.coded.value.planes),
            )
        key, value = math.heads(*_read(views.key, views.value, own, numbers, lane))
        return attend_partial(query, key, value, math=math, seen=None)

    def _on_device(
        self,
        table: LaneTable,
        pages: LayerPages,
        row: _Row,
        query: Tensor,
        math: AttentionMath,
    ) -> Partial:
        """Attend on the device to all other tokens of a row."""
        lanes: list[Partial] = []
        tokens = pages.page_tokens
        for lane, own in enumerate(query.chunk(pages.num_lanes, dim=1)):
            of_table = pages.first_lane + lane
            held = int(table.num_pages[row.row, of_table])
            columns = [c for c in range(held) if c not in row.host]
            numbers = torch.from_numpy(table.pages[row.row, of_table, columns]).long()
            live = int(table.num_slots[row.row, of_table]) - len(row.host) * tokens
            numbers = numbers.to(query.device)
            stored = _read(pages.key, pages.value, pages.coded, numbers, lane)
            key, value = math.heads(*stored)
            own_math = math.of_lanes(pages.num_lanes, torch.tensor([lane], device=query.device))
            if own_math.alibi is not None:
                slot = torch.arange(tokens, device=query.device)
                at = torch.tensor(columns, device=query.device)[:, None] * tokens + slot
                at = at if pages.positions is None else pages.positions[numbers].long()
                own_math = own_math.at(at.flatten()[None, :live], row.length)
            live_kv = key[:, :, :live], value[:, :, :live]
            lanes.append(attend_partial(own, *live_kv, math=own_math, seen=None))
        return _side_by_side(lanes)


def can_attend_in_parts(group: LaneGroup) -> bool:
    """Whether attention in a group can be merged from two parts."""
    return (
        not group.bounded
        and group.topk is None
        and group.page_class.rotated
        and group.page_class.index(VALUE) is not None
    )


def _read(
    key: Tensor, value: Tensor, coded: CodedPages | None, numbers: Tensor, lane: int
) -> tuple[Tensor, Tensor]:
    """Read keys and values of pages, [1, head, slot, elements]."""
    if coded is None:
        return tuple(_joined(plane[numbers]) for plane in (key, value))  # type: ignore[return-value]
    lanes = torch.tensor([lane], device=numbers.device)
    found = []
    for side in (coded.key, coded.value):
        heads, head_dim = side.planes[0].shape[1], side.codec.head_dim
        slots = len(numbers) * key.shape[2]
        out = torch.empty(heads * slots * head_dim, device=numbers.device)
        found.append(decode_pages(side, numbers[None], out, lanes))
    return found[0], found[1]


def _joined(pages: Float[Tensor, "page head token head_dim"]) -> Tensor:
    """Concatenate pages along the token axis."""
    return pages.transpose(0, 1).flatten(1, 2)[None]


def _side_by_side(lanes: Sequence[Partial]) -> Partial:
    """Concatenate the heads of all lanes in order."""
    if len(lanes) == 1:
        return lanes[0]
    return Partial(torch.cat([p.out for p in lanes], 1), torch.cat([p.lse for p in lanes], 1))
