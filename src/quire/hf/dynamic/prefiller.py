"""Prefill of prompts by a batching rule: in their rows, in a separate slab, or between steps."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.hf.dynamic.batch_memory import BatchMemory
from quire.hf.dynamic.batch_options import ASYNC, BatchOptions
from quire.hf.dynamic.batch_slots import BatchSlots
from quire.hf.dynamic.forking import Forking
from quire.hf.dynamic.prefill import Prefill, start_in_separate_slab
from quire.hf.dynamic.query import Query, QueryQueues, QueryState, ReadRecord, StepRecord
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.in_place import SlabRows
from quire.scheduler.batchers.base import BatchView, DenseRule

_PREFILL_AHEAD = 4  # queries, if prompts are prefilled in the background


class Prefiller:
    """Prefills the prompts of a dynamic batch.

    Args:
        model: runs the prefill.
        options: options of the batch.
        rule: groups prompts.
        batch_slots, queues, memory: rows, queues and memory of the batch.
        forking: samples first tokens, and starts the other completions of prompts.

    Attributes:
        background: the prefill that runs in the background; None if there is none.
    """

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        rule: DenseRule,
        batch_slots: BatchSlots,
        queues: QueryQueues,
        memory: BatchMemory,
        forking: Forking,
    ) -> None:
        self.background: Prefill | None = None
        self._unfinished: list[Prefill] = []
        self._model, self._options, self._rule = model, options, rule
        self._batch_slots, self._queues, self._memory = batch_slots, queues, memory
        self._forking, self._side = forking, SideStream(model.shape.device)

    @property
    def in_background(self) -> bool:
        """Whether prompts are prefilled between steps."""
        return self._options.prefill == ASYNC and self._rule.reads_ahead

    def prefill(
        self, group: Sequence[Query], record: StepRecord, rows: SlabRows | None = None
    ) -> None:
        """Prefill a group completely, in `rows` if set, otherwise in a separate slab."""
        prefill = self._begin(group, rows)
        while not prefill.done:
            self._advance(prefill, prefill.num_tokens, record)

    def prefill_now(self, view: BatchView[Query], record: StepRecord) -> bool:
        """Prefill the next group at once; return False if it runs in the background or is empty."""
        if self.in_background and self._batch_slots.live and not self._urgent():
            return False
        if self.background is not None and not self._urgent():
            self._side.join()
            self._advance(self.background, self.background.num_tokens, record)
            return True
        group = self._memory.affordable(self._rule.next_group(view))
        if not group:
            return False
        self.prefill(group, record)
        return True

    def prefill_ahead(self, view: BatchView[Query], record: StepRecord) -> None:
        """Continue the background prefill, within the token budget of a step.

        On a GPU it overlaps the next step; a prefilled query has its first token after that step.
        """
        if self.background is not None and self.background.done:
            self._finish(self.background)
        if not self.in_background or not self._batch_slots.live:
            return
        if self.background is None and len(self._queues.ready) < _PREFILL_AHEAD:
            group = self._memory.affordable(self._rule.next_group(view))
            if not group:
                return
            self.background = self._begin(group)
        if self.background is not None:
            with self._side.use():
                self._run_chunk(self.background, self._options.prefill_tokens, record)
            if self.background.done and not self._side.overlaps:
                self._finish(self.background)

    def drop_all(self) -> list[Query]:
        """Drop all unfinished prefills after a failed forward.

        Returns:
            Their queries.
        """
        self._side.join()
        prefills, self._unfinished, self.background = self._unfinished, [], None
        for prefill in prefills:
            prefill.drop()
        return [query for prefill in prefills for query in prefill.queries]

    def _urgent(self) -> bool:
        """Whether the first waiting query outranks a running, ready or prefilling query."""
        if not self._queues.waiting:
            return False
        prefilling = self.background.queries if self.background else ()
        others = (*self._batch_slots.live, *self._queues.ready, *prefilling)
        return any(self._queues.waiting[0].priority < other.priority for other in others)

    def _begin(self, group: Sequence[Query], rows: SlabRows | None = None) -> Prefill:
        if rows is not None:
            prefill = Prefill(self._model, group, rows)
        else:
            prefill = start_in_separate_slab(self._model, group, self._memory.device)
        self._unfinished.append(prefill)
        for query in group:
            self._queues.leave(query)
            query.state = QueryState.READING
            if query.started_s is None:
                query.started_s = self._options.clock()
        return prefill

    def _advance(self, prefill: Prefill, tokens: int, record: StepRecord) -> None:
        if not prefill.done:
            self._run_chunk(prefill, tokens, record)
        if prefill.done:
            self._finish(prefill)

    def _run_chunk(self, prefill: Prefill, tokens: int, record: StepRecord) -> None:
        started_s = self._options.clock()
        seen = prefill.columns_done
        columns = prefill.advance(tokens)
        taken_s = self._options.clock() - started_s
        record.reads.append(ReadRecord(len(prefill.queries), columns, seen, taken_s))

    def _finish(self, prefill: Prefill) -> None:
        self._side.join(prefill.logits.values())
        prefill.finish()
        if prefill is self.background:
            self.background = None
        for query in prefill.queries:
            if query.row is not None:
                query.state = QueryState.RUNNING
        self._forking.accept(prefill.logits)
        for query in prefill.queries:
            self._place_prefilled(query)
        self._unfinished.remove(prefill)

    def _place_prefilled(self, query: Query) -> None:
        if query.row is not None:
            if query.finished:
                self._batch_slots.leave(query)  # cleared: the row may be reused for prefill
        elif query.finished:
            query.drop_kv()
        else:
            self._memory.store(query)
            self._queues.add_ready(query)


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
