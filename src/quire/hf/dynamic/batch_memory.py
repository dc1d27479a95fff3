"""Memory of a dynamic batch: what lies on the device, what on the host, who has to make room."""

import torch

from quire.errors import HostPoolFull, NeverFits
from quire.hf.dynamic.batch_options import HOST, BatchOptions
from quire.hf.dynamic.batch_slots import BatchSlots, final_columns
from quire.hf.dynamic.prefill import prefill_bytes
from quire.hf.dynamic.query import Query, QueryQueues
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.window import spare_columns

_HOST = torch.device("cpu")
_COMES_BACK = 0.9  # of `scale_at`: more rows only below it, or they would go and come in turns


class BatchMemory:
    """Bytes, and who is taken out of rows for want of them.

    Args:
        model: whose KV it is.
        options: limits.
        batch_slots: rows.
        line: where those go who are taken out.
        device, host: count bytes.
    """

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        batch_slots: BatchSlots,
        line: QueryQueues,
        device: ByteMeter,
        host: ByteMeter,
    ) -> None:
        self.device, self.host = device, host
        self._model, self._batch_slots, self._line = model, batch_slots, line
        self._capacity_tokens = options.capacity_tokens
        self._scale_at, self._on_host = options.scale_at, options.queue == HOST

    # ---- what fits -----------------------------------------------------------------------------

    def refuse_what_never_fits(self, query: Query) -> None:
        """Refuse a query that is over the limit even alone.

        Raises:
            NeverFits: says by how much.
        """
        if self._scale_at is None:
            return
        tokens, shape = query.final_tokens, self._model.shape
        read = query.num_to_read
        entering = shape.growing_bytes(1, read + spare_columns(read)) + shape.token_bytes * read
        alone = max(shape.growing_bytes(1, tokens + spare_columns(tokens)), entering)
        if alone > self._scale_at:
            raise NeverFits(
                f"a query of {tokens:,} tokens takes {alone:,} B of KV alone, scale_at is "
                f"{self._scale_at:,} B: raise it, or ask for fewer tokens"
            )

    def fits(self, rows: int, columns: int, *, more: bool = True) -> bool:
        """Whether the slab may come to hold so many rows and columns.

        Args:
            rows: of the slab.
            columns: of the slab.
            more: as a step up, which leaves room to grow.
        """
        if self._scale_at is None:
            return True
        limit = self._scale_at * (_COMES_BACK if more else 1.0)
        return self._others() + self._batch_slots.peak_bytes(rows, columns) <= limit

    def affordable(self, group: list[Query]) -> list[Query]:
        """As many of a group as may be read beside what there is; one where nothing runs."""
        if self._scale_at is None:
            return group
        used = self.device.used_bytes
        if self._batch_slots.live:  # whose next step comes after the reading
            used = self._others() + self._batch_slots.peak_bytes(
                len(self._batch_slots.rows), self._batch_slots.columns + 1
            )
        room = self._scale_at - used
        least = 0 if self._batch_slots.live or self._line.ready else 1
        while len(group) > least and prefill_bytes(self._model, group) > room:
            group = group[:-1]
        return group

    def may_begin(self, members: list[Query]) -> bool:
        """Whether a batch that runs to its end may begin with these."""
        if self._capacity_tokens and final_columns(members) > self._capacity_tokens:
            return False
        if self._scale_at is None:
            return True
        slab = self._model.shape.slab_bytes(len(members), final_columns(members))
        return self._others() + slab <= self._scale_at

    def planned_columns(self) -> int:
        """Columns that will be needed for certain; 0 where rows may have to go before."""
        if self._scale_at is not None:
            return 0
        running = (query.certain_tokens for query in self._batch_slots.live)
        return max(self._line.certain_tokens, *running, 0)

    def make_room_for(self, query: Query) -> None:
        """Where nothing runs, let others wait on the host until this one can enter."""
        while not self.fits(1, query.num_to_read, more=False):
            if not self._send_ready_to_host(but=query):
                return

    def _others(self) -> int:
        return self.device.used_bytes - self._batch_slots.num_bytes

    # ---- who gives way -------------------------------------------------------------------------

    def shrink(self) -> None:
        """Take rows out until the next step fits; those of the lowest rank first, never the last.

        What waits with its KV on the device goes to the host before a row does.
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
            self.take_out(max(batch_slots.live, key=lambda query: query.rank))
        if self._taken < batch_slots.slab.rows:
            rows, columns = self._taken, batch_slots.columns + 1
            while not self._fits_beside(rows, columns) and self._send_ready_to_host():
                pass
            batch_slots.resize(rows, 0)

    def _fits_beside(self, rows: int, columns: int) -> bool:
        """Whether a part of a slab of this size may lie beside the one that there is."""
        assert self._scale_at is not None
        shape = self._model.shape
        part = shape.growing_bytes(rows, columns) - shape.slab_bytes(rows, columns)
        return self.device.used_bytes + part <= self._scale_at

    @property
    def _taken(self) -> int:
        return max(1, len(self._batch_slots.live))

    def _send_ready_to_host(self, but: Query | None = None) -> bool:
        for query in self._line.ready:
            if query is not but and query.kv is not None and query.kv.lies_in(self.device):
                self._line.leave(query)
                self.take_in(query)
                return True
        return False

    def take_out(self, query: Query) -> None:
        """Free a query's row. Its KV goes to the host; where that is full it is read again."""
        query.preemptions += 1
        try:
            self._batch_slots.take_out(query, _HOST, self.host)
        except HostPoolFull:
            self._batch_slots.leave(query)
            self._line.wait(query)
        else:
            self._line.stand_ready(query)

    # ---- the queue -----------------------------------------------------------------------------

    def store(self, query: Query) -> None:
        """Put a prefilled query's KV where the queue lies; on the device where the host is full."""
        if self._on_host and query.kv is not None:
            assert query.kv.lies_in(self.device)
            if self.host.can_take(query.kv.num_bytes):
                query.kv = query.kv.moved(_HOST, self.host)

    def take_in(self, query: Query) -> None:
        """Let a query stand in line: with its KV on the host, or to be read again."""
        try:
            query.kv = query.kv and query.kv.moved(_HOST, self.host)
        except HostPoolFull:
            query.drop_kv()
        if query.kv is None:
            self._line.wait(query)
        else:
            self._line.stand_ready(query)

    def fetch(self, query: Query) -> None:
        """Bring KV that lies on the host to the device, where that fits."""
        if query.kv is None or query.kv.lies_in(self.device):
            return
        more = query.kv.num_bytes
        if self._scale_at is None or self.device.used_bytes + more <= self._scale_at:
            query.kv = query.kv.moved(self._model.shape.device, self.device)
