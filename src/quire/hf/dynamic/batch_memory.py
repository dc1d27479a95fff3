"""Memory of a dynamic batch: KV on the device and in CPU memory, and preemption."""

import torch

from quire.errors import HostMemoryFull, NeverFits
from quire.hf.dynamic.batch_options import HOST, BatchOptions
from quire.hf.dynamic.batch_slots import BatchSlots, final_columns
from quire.hf.dynamic.prefill import prefill_bytes
from quire.hf.dynamic.query import Query, QueryQueues
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.window import spare_columns

_HOST = torch.device("cpu")
_ADD_ROWS_BELOW = (
    0.9  # fraction of `scale_at` below which rows are added; avoids repeated preemption
)


class BatchMemory:
    """Byte limits of a batch; preempts queries when memory is short.

    Args:
        model: computes the shape of the KV.
        options: limits of the batch.
        batch_slots: rows of the batch.
        queues: queues for preempted queries.
        device, host: count bytes.
    """

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
        self._scale_at, self._on_host = options.scale_at, options.queue == HOST

    # ---- what fits -----------------------------------------------------------------------------

    def refuse_too_large(self, query: Query) -> None:
        """Refuse a query that exceeds the limit even alone.

        Raises:
            NeverFits: states the needed and the allowed bytes.
        """
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
        """Whether a slab of this size is within the limit.

        Args:
            rows: rows of the slab.
            columns: columns of the slab.
            more: whether rows are added; the limit is then lower, to leave memory for growth.
        """
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
        """Whether a partial slab of this size fits in addition to the current slab."""
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

    def store(self, query: Query) -> None:
        """Move a prefilled query's KV to the queue's memory, unless CPU memory is full."""
        if self._on_host and query.kv is not None:
            assert query.kv.lies_in(self.device)
            if self.host.can_reserve(query.kv.num_bytes):
                query.kv = query.kv.moved(_HOST, self.host)

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
