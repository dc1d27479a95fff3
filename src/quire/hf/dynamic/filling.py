"""Filling of free rows: prefills prompts under a batching rule, admits ready queries, preempts."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice

from quire.hf.dynamic.batch_memory import (
    BatchMemory,
    BatchSlots,
    DensePrefill,
    final_columns,
    start_in_separate_slab,
)
from quire.hf.dynamic.batch_options import BatchOptions
from quire.hf.dynamic.query import Query, QueryQueues, QueryState, ReadRecord, StepRecord
from quire.hf.dynamic.sampling_step import DenseSampling
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.slab import SlabRows
from quire.scheduler.batchers import parse_dense_batcher
from quire.scheduler.batchers.base import BatchView


class Filling:
    """Schedules prefills and assigns rows to queries.

    Attributes:
        shaped: queries whose prompts are prefilled in the batch's next forward (vector shaping).
    """

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        batch_slots: BatchSlots,
        queues: QueryQueues,
        memory: BatchMemory,
        sampling_step: DenseSampling,
    ) -> None:
        self.shaped: list[Query] = []
        self.rule = parse_dense_batcher(options.batcher)
        self._unfinished: list[DensePrefill] = []
        self._model, self._sampling_step = model, sampling_step
        self._options = options
        self._batch_slots, self._queues, self._memory = batch_slots, queues, memory

    def view(self) -> BatchView[Query]:
        return BatchView(
            size=self._options.batch_size,
            live=self._batch_slots.live,
            waiting=self._queues.waiting,
            ready=self._queues.ready,
            columns=self._batch_slots.columns,
            group_tokens=self._options.group_tokens,
        )

    # ---- rows ----------------------------------------------------------------------------------

    def preempt_for_priority(self) -> None:
        """Preempt running queries if queued queries of higher priority have no free row."""
        if self.rule.runs_to_end:
            return
        free = self._options.batch_size - len(self._batch_slots.live)
        first = merge(self._queues.ready, self._queues.waiting, key=_rank)
        for candidate in list(islice(first, self._options.batch_size + 1)):
            if free > 0 and self._has_room(candidate):
                free -= 1
                continue
            last = max(self._batch_slots.live, key=_rank, default=None)
            if last is None or last.priority <= candidate.priority:
                return
            self._memory.preempt(last)

    def fill(self, record: StepRecord) -> None:
        self.shaped = []
        if not self.rule.open_rows(self.view()):
            return
        if self.rule.runs_to_end:
            self._begin_batch(record)
            return
        if not self._batch_slots.live:
            self._batch_slots.close()
        self._batch_slots.plan_for(self._memory.planned_columns())
        while len(self._batch_slots.live) < self._options.batch_size:
            if self._may_prefill_in_rows():
                if not self._prefill_in_rows(record):
                    break
                continue
            query = self._next(record)
            if query is None or not self._has_room(query):
                break
            self._add_rows(1, query.num_to_read)
            self._embed(query)
        if self.rule.shapes:
            self._shape()
        if not len(self._queues):
            self._drop_free_rows()

    def _next(self, record: StepRecord) -> Query | None:
        """The next query to place in a row, prefilled if necessary; None if there is none."""
        while not self.rule.shapes and self._wants_more():
            # prefill the next group
            group = self._memory.affordable(self.rule.next_group(self.view()))
            if group:
                self._prefill(group, record)
            if not bool(group):
                break
        return self.rule.choose(self.view())

    def _wants_more(self) -> bool:
        few = len(self._queues.ready) < self.rule.min_ready
        return few or self.rule.choose(self.view()) is None

    def _has_room(self, query: Query) -> bool:
        batch_slots = self._batch_slots
        if not batch_slots.live:
            self._memory.make_room_for(query)
            return True
        rows = max(len(batch_slots.rows), len(batch_slots.live) + 1)
        return self._memory.fits(rows, max(batch_slots.columns, query.num_to_read))

    def _add_rows(self, least: int, longest: int) -> None:
        """Add free rows up to `least`, and more if more queries are queued and fit."""
        batch_slots = self._batch_slots
        live = len(batch_slots.live)
        if len(batch_slots.rows) >= live + least:
            return
        columns = max(batch_slots.columns, longest)
        rows = min(self._options.batch_size, live + max(least, len(self._queues)))
        while rows > live + least and not self._memory.fits(rows, columns):
            rows -= 1
        batch_slots.resize(rows, longest)

    # ---- prefill ---------------------------------------------------------------------------

    def _prefill(
        self, group: Sequence[Query], record: StepRecord, rows: SlabRows | None = None
    ) -> None:
        """Prefill a group completely, in `rows` if set, otherwise in a separate slab."""
        prefill = self._begin(group, rows)
        started_s = self._options.clock()
        prefill.run()
        taken_s = self._options.clock() - started_s
        record.reads.append(ReadRecord(len(group), prefill.columns, taken_s))
        self._finish(prefill)

    def _begin(self, group: Sequence[Query], rows: SlabRows | None = None) -> DensePrefill:
        if rows is not None:
            prefill = DensePrefill(self._model, group, rows)
        else:
            prefill = start_in_separate_slab(self._model, group, self._memory.device)
        self._unfinished.append(prefill)
        for query in group:
            self._queues.leave(query)
            query.state = QueryState.READING
            if query.started_s is None:
                query.started_s = self._options.clock()
        return prefill

    def _finish(self, prefill: DensePrefill) -> None:
        prefill.finish()
        for query in prefill.queries:
            if query.row is not None:
                query.state = QueryState.RUNNING
        self._sampling_step.first(prefill.logits)
        for query in prefill.queries:
            if query.row is not None:
                if query.finished:
                    self._batch_slots.leave(query)  # cleared: the row may be reused for prefill
            elif query.finished:
                query.drop_kv()
            else:
                self._queues.add_ready(query)
        self._unfinished.remove(prefill)

    # ---- prefill in the query's row ------------------------------------------------------------

    def _may_prefill_in_rows(self) -> bool:
        """Whether the next queries are prefilled in their own rows, without the ready queue."""
        rule = self.rule
        if rule.min_ready > 1 or rule.shapes or not self._queues.waiting:
            return False
        return rule.choose(self.view()) is None

    def _prefill_in_rows(self, record: StepRecord) -> bool:
        view = self.view()
        group = self.rule.next_group(view)[: view.free]
        while group and not self._has_room_for(group):
            group.pop()
        if group:
            self._add_rows(len(group), max(query.num_to_read for query in group))
            rows, placed = self._batch_slots.reserve_rows(group)
            self._prefill(placed, record, rows)
        return bool(group)

    def _has_room_for(self, group: list[Query]) -> bool:
        if len(group) == 1:
            return self._has_room(group[0])
        rows = max(len(self._batch_slots.rows), len(self._batch_slots.live) + len(group))
        longest = max(query.num_to_read for query in group)
        return self._memory.fits(rows, max(self._batch_slots.columns, longest))

    def _embed(self, query: Query) -> None:
        self._queues.leave(query)
        self._batch_slots.embed(query)

    def _drop_free_rows(self) -> None:
        live = len(self._batch_slots.live)
        if live < len(self._batch_slots.rows):
            self._batch_slots.resize(live, 0) if live else self._batch_slots.close()

    # ---- prefill in the batch's forward --------------------------------------------------------

    def _shape(self) -> None:
        """Place waiting queries in free rows; the next forward prefills all of them."""
        group = self.rule.next_group(self.view())
        live, columns = len(self._batch_slots.live), self._batch_slots.columns
        while len(group) > 1 or (group and live):
            longest = max(query.num_to_read for query in group) + 1
            rows = max(len(self._batch_slots.rows), live + len(group))
            if self._memory.fits(rows, columns + longest):
                break
            group.pop()
        if group:
            self._add_rows(len(group), columns + max(query.num_to_read for query in group) + 1)
        self._place(group)

    def _place(self, group: list[Query]) -> None:
        for query in group:
            self._queues.leave(query)
            self._batch_slots.place(query)
        self.shaped = group

    def requeue(self) -> None:
        """Queue again the queries whose tokens the forward could not process."""
        for query in self.shaped:
            self._batch_slots.leave(query, clear=False)
            self._queues.wait(query)
        self.shaped = []

    def recover(self) -> None:
        """Recover from a failed step: queue queries with incomplete KV for recompute."""
        prefills, self._unfinished = self._unfinished, []
        for prefill in prefills:
            prefill.drop()
        unread = [query for prefill in prefills for query in prefill.queries]
        queries = dict.fromkeys([*self._batch_slots.live, *unread])
        self._batch_slots.close()
        self.shaped = []
        for query in queries:
            query.row = None
            if query.state in (QueryState.RUNNING, QueryState.READING):
                query.drop_kv()
                self._queues.wait(query)

    def _begin_batch(self, record: StepRecord) -> None:
        """Start a batch that runs to its end, in a slab of its final size."""
        members = self._members()
        if not members:
            return
        self._batch_slots.start_over(len(members), final_columns(members))
        waiting = [query for query in members if query.state is QueryState.WAITING]
        for query in members:
            if query.state is QueryState.READY:
                self._embed(query)
        if self.rule.shapes:
            self._place(waiting)
            return
        while waiting:
            group = self.rule.next_group(replace(self.view(), waiting=waiting))
            rows, placed = self._batch_slots.reserve_rows(group)
            self._prefill(placed, record, rows)
            waiting = [query for query in waiting if query not in placed]

    def _members(self) -> list[Query]:
        """Queries of the next batch. With vector shaping, either all or none of them have KV."""
        first = self._queues.first()
        if first is None:
            return []
        self._batch_slots.close()
        queries = sorted([*self._queues.ready, *self._queues.waiting], key=_rank)
        if self.rule.shapes:
            queries = [query for query in queries if query.state is first.state]
        members = queries[: self._options.batch_size]
        while len(members) > 1 and not self._memory.may_begin(members):
            members.pop()
        return members


def _rank(query: Query) -> tuple[int, int | float, int]:
    return query.rank
