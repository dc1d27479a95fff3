"""Prefill of prompts under a batching rule: in their rows, in a separate slab, or between steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.hf.dynamic.batch_memory import BatchMemory
from quire.hf.dynamic.batch_options import ASYNC, BatchOptions
from quire.hf.dynamic.batch_slots import BatchSlots
from quire.hf.dynamic.prefill import Prefill, read_apart
from quire.hf.dynamic.query import Query, QueryQueues, QueryState, ReadRecord, StepRecord
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.in_place import SlabRows
from quire.scheduler.batchers.base import BatchView, DenseRule

_READ_AHEAD = 4  # queries, if prompts are prefilled in the background

Accept = Callable[[dict[Query, Tensor]], None]


class Reader:
    """Prefills the prompts of a dynamic batch.

    Args:
        model: runs the prefill.
        options: options of the batch.
        rule: groups prompts.
        batch_slots, line, memory: slots, queue and memory of the batch.
        accept: called with the logits of prefilled prompts; samples each query's first token.

    Attributes:
        reading: the group whose prefill runs in the background.
    """

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        rule: DenseRule,
        batch_slots: BatchSlots,
        line: QueryQueues,
        memory: BatchMemory,
        accept: Accept,
    ) -> None:
        self.reading: Prefill | None = None
        self._unfinished: list[Prefill] = []
        self._model, self._options, self._rule = model, options, rule
        self._batch_slots, self._line, self._memory = batch_slots, line, memory
        self._accept, self._side = accept, SideStream(model.shape.device)

    @property
    def in_background(self) -> bool:
        """Whether prompts are prefilled between steps."""
        return self._options.prefill == ASYNC and self._rule.reads_ahead

    def read(
        self, group: Sequence[Query], record: StepRecord, rows: SlabRows | None = None
    ) -> None:
        """Prefill a group completely, in `rows` or, if unset, in a separate slab."""
        reading = self._begin(group, rows)
        while not reading.done:
            self._advance(reading, reading.num_tokens, record)

    def read_now(self, view: BatchView[Query], record: StepRecord) -> bool:
        """Prefill a group now, unless it runs in the background; False if there is no group."""
        if self.in_background and self._batch_slots.live and not self._urgent():
            return False
        if self.reading is not None and not self._urgent():
            self._side.join()
            self._advance(self.reading, self.reading.num_tokens, record)
            return True
        group = self._memory.affordable(self._rule.next_group(view))
        if not group:
            return False
        self.read(group, record)
        return True

    def read_ahead(self, view: BatchView[Query], record: StepRecord) -> None:
        """Continue the background prefill, within the token budget of a step.

        On a GPU it overlaps the next step; a prefilled query has its first token after that step.
        """
        if self.reading is not None and self.reading.done:
            self._finish(self.reading)
        if not self.in_background or not self._batch_slots.live:
            return
        if self.reading is None and len(self._line.ready) < _READ_AHEAD:
            group = self._memory.affordable(self._rule.next_group(view))
            if not group:
                return
            self.reading = self._begin(group)
        if self.reading is not None:
            with self._side.use():
                self._read_on(self.reading, self._options.prefill_tokens, record)
            if self.reading.done and not self._side.overlaps:
                self._finish(self.reading)

    def give_up(self) -> list[Query]:
        """Drop all prefills in progress after a failed forward.

        Returns:
            Their queries.
        """
        self._side.join()
        readings, self._unfinished, self.reading = self._unfinished, [], None
        for reading in readings:
            reading.drop()
        return [query for reading in readings for query in reading.queries]

    def _urgent(self) -> bool:
        """Whether the first waiting query outranks a running, ready or prefilling query."""
        if not self._line.waiting:
            return False
        read = self.reading.queries if self.reading else ()
        others = (*self._batch_slots.live, *self._line.ready, *read)
        return any(self._line.waiting[0].priority < other.priority for other in others)

    def _begin(self, group: Sequence[Query], rows: SlabRows | None = None) -> Prefill:
        if rows is not None:
            reading = Prefill(self._model, group, rows)
        else:
            reading = read_apart(self._model, group, self._memory.device)
        self._unfinished.append(reading)
        for query in group:
            self._line.leave(query)
            query.state = QueryState.READING
            if query.started_s is None:
                query.started_s = self._options.clock()
        return reading

    def _advance(self, reading: Prefill, tokens: int, record: StepRecord) -> None:
        if not reading.done:
            self._read_on(reading, tokens, record)
        if reading.done:
            self._finish(reading)

    def _read_on(self, reading: Prefill, tokens: int, record: StepRecord) -> None:
        started_s = self._options.clock()
        seen = reading.columns_read
        columns = reading.advance(tokens)
        taken_s = self._options.clock() - started_s
        record.reads.append(ReadRecord(len(reading.queries), columns, seen, taken_s))

    def _finish(self, reading: Prefill) -> None:
        self._side.join(reading.logits.values())
        reading.finish()
        if reading is self.reading:
            self.reading = None
        for query in reading.queries:
            if query.row is not None:
                query.state = QueryState.RUNNING
        self._accept(reading.logits)
        for query in reading.queries:
            self._go_on(query)
        self._unfinished.remove(reading)

    def _go_on(self, query: Query) -> None:
        if query.row is not None:
            if query.finished:
                self._batch_slots.leave(query)  # cleared: the row may be reused for prefill
        elif query.finished:
            query.drop_kv()
        else:
            self._memory.store(query)
            self._line.stand_ready(query)


# ---- side stream ---------------------------------------------------------------------------------

# Background prefill: overlaps the steps on a GPU, runs between them on other devices.


class SideStream:
    """A separate CUDA stream; on other devices there is no overlap.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    @property
    def overlaps(self) -> bool:
        """Whether work in a `use` block may still run when the block ends."""
        return self._stream is not None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Run the block on the side stream, after all work already queued on the device."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, results: Iterable[Tensor] = ()) -> None:
        """Make later work on the current stream wait for the side stream.

        Args:
            results: tensors of the side stream that later work uses; keeps their memory allocated.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for result in results:
            result.record_stream(current)
