"""Memory of a dynamic batch: KV on the device and in CPU memory, and preemption."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import HostMemoryFull, NeverFits
from quire.hf.dynamic.batch_options import BatchOptions
from quire.hf.dynamic.query import Query, QueryQueues, QueryState
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.row import KVShape, RowKV
from quire.kv.dense.slab import DenseSlab, SlabRows
from quire.kv.dense.space import ByteMeter, Window, spare_columns


class BatchSlots:
    """The rows of the slab and their queries.

    Attributes:
        slab: None before the first row.
        rows: the query in each row of the slab; None if the row is free.
        planned: columns that queries are certain to need; a new slab has at least this many.
    """

    def __init__(
        self, shape: KVShape, meter: ByteMeter, limit: int | None, *, holds: bool = True
    ) -> None:
        self.slab: DenseSlab | None = None
        self.rows: list[Query | None] = []
        self.planned, self._holds = 0, holds
        self._shape, self._meter, self._limit = shape, meter, limit

    def plan_for(self, columns: int) -> None:
        self.planned = columns

    @property
    def live(self) -> list[Query]:
        return [query for query in self.rows if query is not None]

    @property
    def columns(self) -> int:
        return self.slab.window.width if self.slab else 0

    @property
    def num_bytes(self) -> int:
        return self.slab.num_bytes if self.slab else 0

    # ---- number of rows ------------------------------------------------------------------------

    def start_over(self, rows: int, columns: int) -> None:
        """Allocate an empty slab of exactly this size; it grows only if needed."""
        self.close()
        self.slab = DenseSlab(self._shape, rows, columns, meter=self._meter, limit=self._limit)
        self.slab.window.planned = self.planned
        self.rows = [None] * rows

    def resize(self, rows: int, longest: int) -> None:
        """Change the number of rows, never below the occupied ones; free rows are last."""
        if self.slab is None or not self.live:
            window = Window(0, limit=self._limit, planned=self.planned)
            self.start_over(rows, window.new_capacity(max(1, longest)))
            return
        kept: list[int | None] = [i for i, query in enumerate(self.rows) if query is not None]
        kept += [None] * (rows - len(kept))
        self.slab.release_prefix()
        self.slab.window.planned = self.planned
        if self._holds and len(kept) <= self.slab.held_rows:
            self.slab.take_rows(kept)
        else:
            self.slab.select(kept, longest)
        self.rows = [None if row is None else self.rows[row] for row in kept]
        for row, query in enumerate(self.rows):
            if query is not None:
                query.row = row

    def peak_bytes(self, rows: int, columns: int) -> int:
        """Peak bytes of the slab while it grows to this many rows and columns."""
        spare = spare_columns(columns)
        if self.slab is not None and rows == self.slab.rows:
            window, capacity = self.slab.window, self.slab.window.capacity
            if window.has_room(columns - window.width):
                return self.num_bytes
            if columns + spare // 2 <= capacity:
                return self._shape.growing_bytes(rows, capacity)
        return self._shape.growing_bytes(rows, columns + spare)

    def close(self) -> None:
        if self.slab is not None:
            self.slab.free()
        self.slab, self.rows = None, []

    # ---- queries in rows -----------------------------------------------------------------------

    def embed(self, query: Query) -> None:
        """Place a query with KV in a free row and copy its KV there."""
        assert self.slab is not None
        assert isinstance(query.kv, RowKV), "only prefilled queries can be embedded"
        row = self.place(query)
        self.slab.release_prefix()
        self.slab.embed(row, query.kv)
        query.drop_kv()

    def place(self, query: Query) -> int:
        """Place a query in a free row; the next forward processes its tokens."""
        row = query.row = self.rows.index(None)
        self.rows[row] = query
        query.state = QueryState.RUNNING
        return row

    def reserve_rows(self, group: Sequence[Query]) -> tuple[SlabRows, Sequence[Query]]:
        """Place queries in adjacent free rows, where they are prefilled; returns those placed."""
        assert self.slab is not None
        first = self.rows.index(None)
        taken = (i for i in range(first, len(self.rows)) if self.rows[i] is not None)
        group = group[: next(taken, len(self.rows)) - first]
        self.slab.release_prefix()
        self.slab.window.planned = self.planned
        columns = max(query.num_to_read for query in group)
        found = SlabRows(self.slab, first, len(group), columns)
        for row, query in enumerate(group, first):
            self.rows[row], query.row = query, row
        return found, group

    def leave(self, query: Query, *, clear: bool = True) -> None:
        assert self.slab is not None
        assert query.row is not None
        if clear:
            self.slab.clear(query.row)
            self.slab.release_prefix()
        self.rows[query.row] = None
        query.row = None

    def swap_out(self, query: Query, device: torch.device, meter: ByteMeter) -> None:
        """Swap a query's KV out and free its row; without host memory nothing changes."""
        assert self.slab is not None
        assert query.row is not None
        query.kv = self.slab.extract(query.row, device, meter)
        self.leave(query)


def final_columns(queries: Sequence[Query]) -> int:
    """Columns of a batch whose queries start together and run to their end."""
    longest = max(query.num_to_read for query in queries)
    return longest + max(query.columns_left for query in queries)


class DensePrefill:
    """A prefill in progress; prompts start at column 0, shorter prompts have pads at their end.

    Attributes:
        columns: columns of the longest prompt.
        logits: logits of each query's last token; set when the token was processed.
    """

    def __init__(
        self, model: SlabModel, queries: Sequence[Query], slab: DenseSlab | SlabRows
    ) -> None:
        self.queries = list(queries)
        self._token_ids = [query.to_read for query in queries]
        self.columns = max(map(len, self._token_ids))
        self.logits: dict[Query, Float[Tensor, " vocab"]] = {}
        self._model = model
        self._slab = slab

    def run(self) -> None:
        """Process the prompts."""
        wanted = sorted({len(ids) - 1 for ids in self._token_ids})
        logits = self._model.prefill(self._slab, self._token_ids, self.columns, wanted)
        for row, (query, ids) in enumerate(zip(self.queries, self._token_ids, strict=True)):
            self.logits[query] = logits[row, wanted.index(len(ids) - 1)].clone()

    def finish(self) -> None:
        """Assign each query its KV, unless the prefill was in the batch's rows."""
        if isinstance(self._slab, SlabRows):
            self._slab.register([len(ids) for ids in self._token_ids])
            return
        for query, kv in zip(self.queries, self._slab.split(), strict=True):
            query.kv = kv

    def drop(self) -> None:
        if isinstance(self._slab, DenseSlab):
            self._slab.free()


def start_in_separate_slab(
    model: SlabModel, queries: Sequence[Query], meter: ByteMeter
) -> DensePrefill:
    """Start a prefill in a separate slab."""
    columns = max(query.num_to_read for query in queries)
    return DensePrefill(model, queries, DenseSlab(model.shape, len(queries), columns, meter=meter))


def prefill_bytes(model: SlabModel, queries: Sequence[Query]) -> int:
    """Peak bytes of a group's prefill and split: its slab, and one layer of it twice."""
    columns = max(query.num_to_read for query in queries)
    return model.shape.growing_bytes(len(queries), columns)


_HOST = torch.device("cpu")
_ADD_ROWS_BELOW = (
    0.9  # fraction of `scale_at` below which rows are added; avoids repeated preemption
)


class BatchMemory:
    """Byte limits of a batch; preempts queries when memory is short."""

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        batch_slots: BatchSlots,
        queues: QueryQueues,
        device: ByteMeter,
        host: ByteMeter,
    ) -> None:
        self.device, self.host = device, host
        self._model, self._batch_slots, self._queues = model, batch_slots, queues
        self._capacity_tokens = options.capacity_tokens
        self._scale_at = options.scale_at

    # ---- what fits -----------------------------------------------------------------------------

    def refuse_too_large(self, query: Query) -> None:
        if self._scale_at is None:
            return
        tokens, shape = query.final_tokens, self._model.shape
        prefilled = query.num_to_read
        entering_bytes = shape.growing_bytes(1, prefilled + spare_columns(prefilled))
        entering_bytes += shape.token_bytes * prefilled
        alone = max(shape.growing_bytes(1, tokens + spare_columns(tokens)), entering_bytes)
        if alone > self._scale_at:
            raise NeverFits(
                f"a query of {tokens:,} tokens alone needs {alone:,} B of KV, but scale_at is "
                f"{self._scale_at:,} B; raise it, or lower max_new_tokens"
            )

    def fits(self, rows: int, columns: int, *, more: bool = True) -> bool:
        """Whether a slab fits; with `more` rows the limit is lower, to leave memory for growth."""
        if self._scale_at is None:
            return True
        limit = self._scale_at * (_ADD_ROWS_BELOW if more else 1.0)
        return self._others() + self._batch_slots.peak_bytes(rows, columns) <= limit

    def affordable(self, group: list[Query]) -> list[Query]:
        """Return the first queries of a group whose prefill fits; at least one in an idle batch."""
        if self._scale_at is None:
            return group
        used = self.device.used_bytes
        if self._batch_slots.live:  # their next step follows the prefill
            used = self._others() + self._batch_slots.peak_bytes(
                len(self._batch_slots.rows), self._batch_slots.columns + 1
            )
        room = self._scale_at - used
        least = 0 if self._batch_slots.live or self._queues.ready else 1
        while len(group) > least and prefill_bytes(self._model, group) > room:
            group = group[:-1]
        return group

    def may_begin(self, members: list[Query]) -> bool:
        """Whether a batch that runs to its end may start with these queries."""
        if self._capacity_tokens and final_columns(members) > self._capacity_tokens:
            return False
        if self._scale_at is None:
            return True
        slab = self._model.shape.slab_bytes(len(members), final_columns(members))
        return self._others() + slab <= self._scale_at

    def planned_columns(self) -> int:
        """Columns that are certain to be needed; 0 if rows may be preempted."""
        if self._scale_at is not None:
            return 0
        running = (query.certain_tokens for query in self._batch_slots.live)
        return max(self._queues.certain_tokens, *running, 0)

    def make_room_for(self, query: Query) -> None:
        """Swap ready queries to CPU memory until this query fits; for an idle batch."""
        while not self.fits(1, query.num_to_read, more=False):
            if not self._send_ready_to_host(exclude=query):
                return

    def _others(self) -> int:
        return self.device.used_bytes - self._batch_slots.num_bytes

    # ---- preemption ----------------------------------------------------------------------------

    def shrink(self) -> None:
        """Preempt queries until the next step fits, last in rank first; one query remains.

        Ready queries with KV on the device are swapped to CPU memory before a row is preempted.
        """
        batch_slots = self._batch_slots
        if batch_slots.slab is None or self.fits(
            batch_slots.slab.rows, batch_slots.columns + 1, more=False
        ):
            return
        while not self.fits(self._taken, batch_slots.columns + 1, more=False):
            if self._send_ready_to_host():
                continue
            if self._taken == 1:
                break
            self.preempt(max(batch_slots.live, key=lambda query: query.rank))
        if self._taken < batch_slots.slab.rows:
            rows, columns = self._taken, batch_slots.columns + 1
            while not self._fits_in_addition(rows, columns) and self._send_ready_to_host():
                pass
            batch_slots.resize(rows, 0)

    def _fits_in_addition(self, rows: int, columns: int) -> bool:
        assert self._scale_at is not None
        shape = self._model.shape
        part = shape.growing_bytes(rows, columns) - shape.slab_bytes(rows, columns)
        return self.device.used_bytes + part <= self._scale_at

    @property
    def _taken(self) -> int:
        return max(1, len(self._batch_slots.live))

    def _send_ready_to_host(self, exclude: Query | None = None) -> bool:
        for query in self._queues.ready:
            if query is not exclude and query.kv is not None and query.kv.lies_in(self.device):
                self._queues.leave(query)
                self.queue_swapped(query)
                return True
        return False

    def preempt(self, query: Query) -> None:
        """Preempt a query: swap its KV to CPU memory; recompute it if that memory is full."""
        query.preemptions += 1
        try:
            self._batch_slots.swap_out(query, _HOST, self.host)
        except HostMemoryFull:
            self._batch_slots.leave(query)
            self._queues.wait(query)
        else:
            self._queues.add_ready(query)

    # ---- the queue -----------------------------------------------------------------------------

    def queue_swapped(self, query: Query) -> None:
        """Queue a query with its KV in CPU memory, or for recompute if that memory is full."""
        try:
            query.kv = query.kv and query.kv.moved(_HOST, self.host)
        except HostMemoryFull:
            query.drop_kv()
        if query.kv is None:
            self._queues.wait(query)
        else:
            self._queues.add_ready(query)

    def fetch(self, query: Query) -> None:
        """Prefetch a query's KV from CPU memory to the device, if it fits."""
        if query.kv is None or query.kv.lies_in(self.device):
            return
        more = query.kv.num_bytes
        if self._scale_at is None or self.device.used_bytes + more <= self._scale_at:
            query.kv = query.kv.moved(self._model.shape.device, self.device)
