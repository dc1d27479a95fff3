"""Fills free rows: reads prompts when a rule says so, lets ready queries in, makes room."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from quire.hf.dynamic.line import Line
from quire.hf.dynamic.memory import BatchMemory
from quire.hf.dynamic.options import ASYNC, BatchOptions
from quire.hf.dynamic.query import Query, QueryState
from quire.hf.dynamic.reading import Reading
from quire.hf.dynamic.record import ReadRecord, StepRecord
from quire.hf.dynamic.rules.base import BatchView
from quire.hf.dynamic.rules.registry import find_rule
from quire.hf.dynamic.seats import Seats, final_columns
from quire.hf.dynamic.slab_model import SlabModel

_READ_AHEAD = 4  # queries, where prompts are read in the background

Accept = Callable[[dict[Query, Tensor]], None]


class Filling:
    """Who is read when, and who gets which row.

    Args:
        model: reads prompts.
        options: of the batch.
        seats, line, memory: of the batch.
        accept: takes the logits of prompts that were read, and gives each query its first token.

    Attributes:
        rule: decides.
        shaped: queries whose tokens the batch's next forward reads.
        reading: the group that is read in the background.
    """

    def __init__(
        self,
        model: SlabModel,
        options: BatchOptions,
        seats: Seats,
        line: Line,
        memory: BatchMemory,
        accept: Accept,
    ) -> None:
        self.shaped: list[Query] = []
        self.reading: Reading | None = None
        self.rule = find_rule(options.batcher)
        self._model, self._options = model, options
        self._seats, self._line, self._memory = seats, line, memory
        self._accept = accept

    @property
    def in_background(self) -> bool:
        """Whether prompts are read between steps."""
        return self._options.prefill == ASYNC and self.rule.reads_ahead

    def view(self) -> BatchView:
        """What the rule sees."""
        return BatchView(
            size=self._options.batch_size,
            live=self._seats.live,
            waiting=self._line.waiting,
            ready=self._line.ready,
            columns=self._seats.columns,
            group_tokens=self._options.group_tokens,
        )

    # ---- rows ----------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Take rows from those who are less urgent for others who find none free."""
        if self.rule.runs_to_end:
            return
        free = self._options.batch_size - len(self._seats.live)
        for candidate in sorted([*self._line.ready, *self._line.waiting], key=_rank):
            if free > 0 and self._has_room(candidate):
                free -= 1
                continue
            last = max(self._seats.live, key=_rank, default=None)
            if last is None or last.priority <= candidate.priority:
                return
            self._memory.take_out(last)

    def fill(self, record: StepRecord) -> None:
        """Fill the rows that are open."""
        self.shaped = []
        if not self.rule.open_rows(self.view()):
            return
        if self.rule.runs_to_end:
            self._begin_batch(record)
            return
        if not self._seats.live:
            self._seats.close()
        while len(self._seats.live) < self._options.batch_size:
            query = self._next(record)
            if query is None or not self._has_room(query):
                break
            self._add_rows(1, query.num_to_read)
            self._embed(query)
        if self.rule.shapes:
            self._shape()
        if not len(self._line) and self.reading is None:
            self._drop_free_rows()

    def _next(self, record: StepRecord) -> Query | None:
        """Who enters next, read if need be."""
        while not self.rule.shapes and self._wants_more() and self._read_now(record):
            pass
        return self.rule.choose(self.view())

    def _wants_more(self) -> bool:
        few = len(self._line.ready) < self.rule.least_ready
        return few or self.rule.choose(self.view()) is None

    def _has_room(self, query: Query) -> bool:
        seats = self._seats
        if not seats.live:
            self._memory.make_room_for(query)
            return True
        rows = max(len(seats.rows), len(seats.live) + 1)
        return self._memory.fits(rows, max(seats.columns, query.num_to_read))

    def _add_rows(self, least: int, longest: int) -> None:
        """Let the slab have that many free rows, and more where more are waiting and fit."""
        seats = self._seats
        live = len(seats.live)
        if len(seats.rows) >= live + least:
            return
        columns = max(seats.columns, longest)
        rows = min(self._options.batch_size, live + max(least, len(self._line)))
        while rows > live + least and not self._memory.fits(rows, columns):
            rows -= 1
        seats.resize(rows, longest)

    def _embed(self, query: Query) -> None:
        self._line.leave(query)
        self._seats.embed(query)

    def _drop_free_rows(self) -> None:
        live = len(self._seats.live)
        if live < len(self._seats.rows):
            self._seats.resize(live, 0) if live else self._seats.close()

    # ---- prompts read by the batch itself ------------------------------------------------------

    def _shape(self) -> None:
        """Place waiting queries in free rows; the next forward reads them all."""
        group = self.rule.next_group(self.view())
        live, columns = len(self._seats.live), self._seats.columns
        while len(group) > 1 or (group and live):
            longest = max(query.num_to_read for query in group) + 1
            if self._memory.fits(live + len(group), columns + longest):
                break
            group.pop()
        if group:
            self._add_rows(len(group), max(query.num_to_read for query in group) + 1)
        self._place(group)

    def _place(self, group: list[Query]) -> None:
        for query in group:
            self._line.leave(query)
            self._seats.place(query)
        self.shaped = group

    def take_back(self) -> None:
        """Put those in line again whose tokens the forward could not read."""
        for query in self.shaped:
            self._seats.leave(query, clear=False)
            self._line.wait(query)
        self.shaped = []

    def _begin_batch(self, record: StepRecord) -> None:
        """Begin a batch that runs to its end, in a slab of just the size it will need."""
        members = self._members()
        if not members:
            return
        self._seats.start_over(len(members), final_columns(members))
        unread = [query for query in members if query.state is QueryState.WAITING]
        for query in members:
            if query.state is QueryState.READY:
                self._embed(query)
        if self.rule.shapes:
            self._place(unread)
            return
        while unread:
            group = self.rule.next_group(replace(self.view(), waiting=unread))
            group = self._memory.affordable(group) or group[:1]
            self._read(group, record)
            for query in group:
                if query.state is QueryState.READY:
                    self._embed(query)
            unread = [query for query in unread if query not in group]

    def _members(self) -> list[Query]:
        """Who begins together. Where prompts are shaped, those with KV and those without do not."""
        first = self._line.first()
        if first is None:
            return []
        self._seats.close()
        everybody = sorted([*self._line.ready, *self._line.waiting], key=_rank)
        if self.rule.shapes:
            everybody = [query for query in everybody if query.state is first.state]
        members = everybody[: self._options.batch_size]
        apart = not self.rule.shapes
        while len(members) > 1 and not self._memory.may_begin(members, apart=apart):
            members.pop()
        return members

    # ---- prompts read apart --------------------------------------------------------------------

    def _read_now(self, record: StepRecord) -> bool:
        """Read a group at once, unless it is read in the background; False if there is none."""
        if self.in_background and self._seats.live and not self._urgent():
            return False
        if self.reading is not None and not self._urgent():
            self._advance(self.reading, self.reading.num_tokens, record)
            return True
        group = self._memory.affordable(self.rule.next_group(self.view()))
        if not group:
            return False
        self._read(group, record)
        return True

    def _urgent(self) -> bool:
        """Whether the first to be read outranks somebody who runs, or could have been read."""
        if not self._line.waiting:
            return False
        others = [*self._seats.live, *(self.reading.queries if self.reading else ())]
        return all(self._line.waiting[0].priority < other.priority for other in others)

    def _read(self, group: list[Query], record: StepRecord) -> None:
        reading = self._begin(group)
        while not reading.done:
            self._advance(reading, reading.num_tokens, record)

    def read_ahead(self, record: StepRecord) -> None:
        """Read on in the background, within the budget of a step."""
        if not self.in_background or not self._seats.live:
            return
        if self.reading is None and len(self._line.ready) < _READ_AHEAD:
            group = self._memory.affordable(self.rule.next_group(self.view()))
            if not group:
                return
            self.reading = self._begin(group)
        if self.reading is not None:
            self._advance(self.reading, self._options.prefill_tokens, record)

    def _begin(self, group: list[Query]) -> Reading:
        for query in group:
            self._line.leave(query)
            query.state = QueryState.READING
            if query.entered_s is None:
                query.entered_s = self._options.clock()
        return Reading(self._model, group, self._memory.device)

    def _advance(self, reading: Reading, tokens: int, record: StepRecord) -> None:
        started_s = self._options.clock()
        seen = reading.columns_read
        columns = reading.advance(tokens)
        taken_s = self._options.clock() - started_s
        record.reads.append(ReadRecord(len(reading.queries), columns, seen, taken_s))
        if not reading.done:
            return
        reading.finish()
        if reading is self.reading:
            self.reading = None
        self._accept(reading.logits)
        for query in reading.queries:
            if query.finished and query.kv is not None:
                query.kv.free()
                query.kv = None
            else:
                self._memory.store(query)
                self._line.stand_ready(query)


def _rank(query: Query) -> tuple[int, int | float, int]:
    return query.rank
