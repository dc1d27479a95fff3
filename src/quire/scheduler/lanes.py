"""Lanes that evict: how many tokens fit, and evictions before the next tokens are computed.

A lane whose slots plus the next tokens would exceed its cap is evicted to its cap minus `leaving`.
If a budget moves slots between the heads of a layer, the sums over layers are compared instead of
lanes. Torch-free; the eviction policy selects the slots.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError, OutOfPages, PolicyError
from quire.kv.memory import KVMemory
from quire.kv.sharing import LayerReferences
from quire.kv.tables import LaneTable, grown_slots
from quire.layout.evicting import evicting_layers, lane_places
from quire.layout.eviction import (
    DECODE,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    UNLIMITED,
    EvictionSpec,
)
from quire.layout.pages import PageClass
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.request import Division, Request, may_evict
from quire.scheduler.sequence_memory import SequenceMemory

Slots = NDArray[np.int64]
CAP, REPLAY = "cap", "replay"
T = TypeVar("T")


# ---- slot counts ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictingLanes:
    """The lanes that evict tokens, in the order of their layers.

    Layers with different codecs are in different lane groups. Caps and rules count all their lanes.

    Attributes:
        tables: page tables of the lane groups.
        places: for each table, the index [lanes of the table] of its lanes among all lanes.
        layers: the model's layers, ascending.
        lanes_per_layer: lanes of a layer.
        page_tokens: slots of a page.
    """

    tables: tuple[LaneTable, ...]
    places: tuple[Slots, ...]
    layers: tuple[int, ...]
    lanes_per_layer: int
    page_tokens: int

    def of_layer(self, layer: int) -> slice:
        """The lanes of one of `layers`, among all lanes."""
        first = self.layers.index(layer) * self.lanes_per_layer
        return slice(first, first + self.lanes_per_layer)

    @property
    def num_lanes(self) -> int:
        """Number of lanes of a sequence."""
        return sum(table.group.num_lanes for table in self.tables)

    def held(self, request: Request) -> Slots:
        """Slots [lanes] that a running request holds."""
        row = request.memory.row
        if len(self.tables) == 1:
            only: Slots = self.tables[0].num_slots[row].astype(np.int64)
            return only
        held = np.empty(self.num_lanes, dtype=np.int64)
        for table, places in zip(self.tables, self.places, strict=True):
            held[places] = table.num_slots[row]
        return held


def evicting_lanes(memory: KVMemory) -> EvictingLanes | None:
    """The lanes that evict tokens; None if no lane does."""
    tables = tuple(t for t in memory.tables.values() if not t.group.ordered and not t.group.private)
    if not tables:
        return None
    group = tables[0].group
    layers = evicting_layers(memory.layout)
    return EvictingLanes(
        tables=tables,
        places=tuple(lane_places(table.group, layers) for table in tables),
        layers=layers,
        lanes_per_layer=group.lanes_per_layer,
        page_tokens=group.page_class.tokens,
    )


def lane_capacities(spec: EvictionSpec, num_lanes: int) -> Slots:
    """Cap [lanes] of each lane; a lane with several heads has their lowest cap.

    Args:
        spec: an eviction specification with a cap.
        num_lanes: number of lanes.
    """
    assert spec.cap is not None, "only for requests that evict"
    return _caps(spec.cap, spec.lane_capacities, num_lanes)


@lru_cache(maxsize=1024)
def _caps(cap: int, by_head: tuple[int, ...] | None, lanes: int) -> Slots:
    if by_head is None:
        caps = np.full(lanes, cap, dtype=np.int64)
    else:
        caps = np.array(by_head, dtype=np.int64).reshape(lanes, -1).min(axis=1)
    caps.setflags(write=False)
    return caps


def slots_to_keep(request: Request, lanes: EvictingLanes, tokens: int) -> Slots | None:
    """Slots [lanes] to retain before `tokens` more are computed; None if no eviction is due.

    With `when=pressure` no eviction is due here: see `over_cap`.
    """
    spec, done = request.eviction.spec, request.progress.num_computed
    prompt_tokens = len(request.prompt_token_ids)
    if spec.cap is None or spec.when == PRESSURE:
        return None
    if spec.when == PREFILL_END:
        if done != prompt_tokens:
            return None
        tokens = 0  # the cap does not include later tokens
    elif spec.when == DECODE and done < prompt_tokens:
        return None
    return _at_capacity(spec, lanes, lanes.held(request), tokens)


def division_is_due(request: Request, lanes: EvictingLanes, tokens: int) -> bool:
    """Whether the caps of a request's lanes are to be set before `tokens` more are computed.

    With `when=pressure` they are set when the request evicts: see `over_cap`.
    """
    spec = request.eviction.spec
    if not request.eviction.pending or spec.when == PRESSURE:
        return False
    if request.progress.num_computed >= len(request.prompt_token_ids):
        return True
    return spec.divided and slots_to_keep(request, lanes, tokens) is not None


def note_division(request: Request) -> None:
    """Record that the caps of a request's lanes were set from the tokens computed so far."""
    done = request.progress.num_computed
    request.eviction.divided_tokens = done
    request.eviction.pending = done < len(request.prompt_token_ids)


def over_cap(request: Request, lanes: EvictingLanes, tokens: int = 0) -> Slots | None:
    """Slots [lanes] to retain under memory pressure; None if no lane is above its cap.

    Args:
        request: a running request.
        lanes: the lanes that evict tokens.
        tokens: number of next tokens; with 1, lanes at their cap count as above it.
    """
    if request.eviction.spec.cap is None:
        return None
    return _at_capacity(request.eviction.spec, lanes, lanes.held(request), tokens)


def _at_capacity(
    spec: EvictionSpec, lanes: EvictingLanes, held: Slots, tokens: int
) -> Slots | None:
    caps, per_layer = lane_capacities(spec, len(held)), lanes.lanes_per_layer
    if spec.ragged:
        layers, most = held.reshape(-1, per_layer), caps.reshape(-1, per_layer)
        over = layers.sum(axis=1) + tokens * per_layer > most.sum(axis=1)
        if not over.any():
            return None
        down = np.where(over[:, None], most - spec.leaving, layers)
        return np.stack([_fitted(*of_layer) for of_layer in zip(down, layers, strict=True)]).ravel()
    over = held + tokens > caps
    return np.where(over, caps - spec.leaving, held) if over.any() else None


def _fitted(keep: Slots, held: Slots) -> Slots:
    """Limit `keep` to the slots that each lane holds; distribute the difference over the others."""
    fitted = np.minimum(keep, held)
    missing = int(keep.sum() - fitted.sum())
    while missing > 0:
        free = held - fitted
        if not free.any():
            break
        share = np.minimum(free, -(-missing // int(np.count_nonzero(free))))
        share -= np.maximum(0, np.cumsum(share) - missing).clip(max=share)
        fitted += share
        missing -= int(share.sum())
    return fitted


def repeats_later(request: Request) -> bool:
    """Whether evictions of an earlier run are still to be replayed after the computed tokens.

    Until then no other token is evicted.
    """
    trace = request.eviction.trace
    return (
        request.eviction.replayed < len(trace)
        and trace[-1].num_computed > request.progress.num_computed
    )


def due_scoring(request: Request, tokens: int) -> int:
    """Slots of the scoring pass that follows the next `tokens` tokens; 0 if none does.

    A recorded eviction is replayed without scores.
    """
    spec, prompt_tokens = request.eviction.spec, len(request.prompt_token_ids)
    if spec.scoring is None or request.eviction.trace:
        return 0
    ends = request.progress.num_computed + tokens == prompt_tokens
    return spec.scoring_slots(prompt_tokens) if ends else 0


def has_atomic_chunk(request: Request) -> bool:
    """Whether the next chunk must be computed as a whole, after an eviction."""
    spec, done = request.eviction.spec, request.progress.num_computed
    if not spec.evicts_during_prefill or repeats_later(request):
        return False
    return spec.min_cap <= done < len(request.prompt_token_ids)


def lookahead(request: Request) -> int:
    """Tokens for which an eviction frees slots."""
    if not has_atomic_chunk(request):
        return 1
    return min(
        request.eviction.spec.every, len(request.prompt_token_ids) - request.progress.num_computed
    )


def free_tokens(request: Request, lanes: EvictingLanes | None) -> int:
    """Tokens that a request may compute at once, after the eviction that is due before them.

    With these chunks, recomputed output tokens find the same lanes as before the preemption.
    """
    if lanes is None or request.eviction.spec.cap is None:
        return UNLIMITED
    replay = _to_next_replay(request)
    if replay is not None:
        return replay
    spec, done = request.eviction.spec, request.progress.num_computed
    to_prompt_end = len(request.prompt_token_ids) - done
    if has_atomic_chunk(request):
        return lookahead(request)
    if to_prompt_end > 0:
        first = spec.min_cap - done if spec.when == PREFILL_AND_DECODE else UNLIMITED
        return min(first, to_prompt_end if spec.when != PRESSURE else UNLIMITED)
    if spec.when in (PREFILL_END, PRESSURE):
        return UNLIMITED
    keep = slots_to_keep(request, lanes, 1)
    held = lanes.held(request) if keep is None else keep
    free = lane_capacities(request.eviction.spec, len(held)) - held
    if request.eviction.spec.ragged:
        per_layer = lanes.lanes_per_layer
        free = free.reshape(-1, per_layer).sum(axis=1) // per_layer
    return max(1, int(free.min()))


def _to_next_replay(request: Request) -> int | None:
    """Tokens until the next replayed eviction that is not due yet; None if there is none."""
    for entry in request.eviction.trace[request.eviction.replayed :]:
        if entry.num_computed > request.progress.num_computed:
            return entry.num_computed - request.progress.num_computed
    return None


# ---- evictions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evicted:
    """Result of an eviction.

    Attributes:
        slots: number of evicted slots, over all lanes.
        lanes: number of lanes that can evict.
        entry: the evicted tokens; None in a simulation, which does not track tokens.
        freed_bytes: bytes of the freed pages, less those of copies; None: the memory counts them.
        copied_bytes: bytes of private copies; 0 if the memory counts them.
    """

    slots: int
    lanes: int
    entry: EvictionEntry | None = None
    freed_bytes: int | None = None
    copied_bytes: int = 0


@runtime_checkable
class Evictor(Protocol):
    """Selects and evicts slots, and compacts the retained ones; the selection needs tensors."""

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        """Evict slots until each lane of a request has `keep` slots.

        Args:
            request: a running request.
            keep: [lanes] number of slots to retain; -1 for all lanes of layers that remain as they
                are.
            min_gain: evict only if at least this many bytes are freed; None: no minimum.

        Returns:
            None if no slot was evicted.

        Raises:
            PolicyError: the policy broke its contract.
            OutOfPages: no pages for private copies of shared pages; the request is unchanged.
        """
        ...

    def evict_together(self, due: Sequence[tuple[Request, Slots]]) -> list[Evicted | None]:
        """Evict from several requests, without reading which tokens the rule selects.

        Args:
            due: requests, and the number of slots [lanes] to retain of each.

        Returns:
            None for each request that is unchanged and must be evicted with `evict`.
        """
        return [None] * len(due)

    def reads_selection(self, request: Request) -> bool:
        """Whether `evict_together` leaves a request to `evict`, which waits for the device."""
        del request
        return True

    def breaches(self) -> list[tuple[Request, PolicyError]]:
        """Return the requests whose rules broke their contract in an earlier `evict_together`."""
        return []

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Evict the tokens of an entry again.

        Raises:
            OutOfPages: see `evict`.
        """
        ...

    def finalize(self, request: Request) -> None:
        """Distribute the cap of a request over its lanes by its cache.

        Called once its prompt has been computed, or with `EvictionSpec.divided` at each eviction
        until then.

        Raises:
            PolicyError: the policy broke its contract.
        """
        ...


class LaneCapacities:
    """Evicts from lanes that are full.

    Args:
        sequence_memory: the requests' pages.
        evictor: selects and evicts slots; None if no request evicts.
        lifecycle: ends requests whose policy broke its contract.

    Attributes:
        lanes: the lanes that evict tokens; None if no lane does.
        num_evictions, evicted_tokens: totals since the start, without replayed evictions.
    """

    def __init__(
        self,
        sequence_memory: SequenceMemory,
        evictor: Evictor | None,
        lifecycle: Lifecycle,
    ) -> None:
        self._sequence_memory, self._lifecycle = sequence_memory, lifecycle
        self._optional_evictor = evictor
        self.lanes = evicting_lanes(sequence_memory.memory)
        self.num_evictions = 0
        self.evicted_tokens = 0.0
        self._broken: list[tuple[Request, PolicyError]] = []

    @property
    def _evictor(self) -> Evictor:
        if self._optional_evictor is None:
            raise InvariantError("a request evicts, but its engine has no rules")
        return self._optional_evictor

    def has_breaches(self) -> bool:
        """Whether a rule broke its contract in an eviction before the last step; once a step."""
        if self._optional_evictor is not None:
            self._broken += self._optional_evictor.breaches()
        return bool(self._broken)

    def fail_breaches(self) -> None:
        """End the requests of `has_breaches`, before a step is planned."""
        broken, self._broken = self._broken, []
        for request, error in broken:
            if request.is_running:
                self._lifecycle.fail(request, error)

    def evict_to_capacity(self, requests: list[Request]) -> list[Request]:
        """Evict from requests with full lanes; return the requests that can be scheduled."""
        stuck, due, divisions = [], [], []
        for request in requests:
            if request.eviction.spec.cap is None:
                continue
            division = request.eviction.division
            ready, keep = self._try(request, self._keep_due) or (False, None)
            if not ready:
                stuck.append(request)
            elif keep is not None:
                due.append((request, keep))
                divisions.append(division)
        stuck += self._evict_together(due, divisions)
        if not stuck:
            return requests
        # when a failed member had planned forks, its whole group was queued again
        return [r for r in requests if r not in stuck and r.is_running]

    def may_wait(self, requests: Iterable[Request]) -> bool:
        """Whether planning a step may evict tokens that must be read from the device before."""
        if self.lanes is None:
            return False
        capped = (r for r in requests if r.eviction.spec.cap is not None)
        return any(
            r.eviction.spec.when == PRESSURE or (self._is_due(r) and self._must_read(r))
            for r in capped
        )

    def _must_read(self, request: Request) -> bool:
        state = request.eviction
        return (
            state.pending
            or state.next_replay is not None
            or self._sequence_memory.shares_unwritten(request)
            or self._evictor.reads_selection(request)
        )

    def evict_while(
        self, lacks_free_pages: Callable[[], bool], requests: Collection[Request]
    ) -> None:
        """Evict under pressure until enough pages are free; called before any preemption.

        Args:
            lacks_free_pages: whether memory is still short; called only if a request may evict.
            requests: see `evict_under_pressure`; failed requests are removed from it.
        """
        evictable = any(r.eviction.spec.when == PRESSURE for r in requests)
        while evictable and lacks_free_pages() and self.evict_under_pressure(requests):
            pass

    def evict_under_pressure(self, requests: Iterable[Request]) -> bool:
        """Evict the longest request above its cap (`when=pressure`) down to its cap.

        Args:
            requests: running requests; none may be part of the step that is being planned.

        Returns:
            Whether pages were freed.
        """
        evictable = self._evictable(requests)
        return any(self._evict_private(r, tokens=0, min_gain=1) for r in evictable)

    def free_for(self, requests: Iterable[Request], running: Iterable[Request]) -> bool:
        """Evict under pressure; if no page can be freed, free slots in the requests' own pages.

        Args:
            requests: requests that lack pages for their next tokens.
            running: requests that may evict; none may be part of the step that is being planned.

        Returns:
            Whether pages or slots were freed.
        """
        return self.evict_under_pressure(running) or self.reuse_slots(requests)

    def reuse_slots(self, requests: Iterable[Request]) -> bool:
        """Evict from the longest request whose pages are full, to free slots in its pages.

        Its lanes are at their cap and end at a page boundary, so evictions may free no page.

        Args:
            requests: requests that lack a page for their next token; none may be part of the step
                that is being planned.

        Returns:
            Whether one of the requests has free slots now.
        """
        for request in self._evictable(requests):
            assert self.lanes is not None
            full = np.any(self.lanes.held(request) % self.lanes.page_tokens == 0)
            if full and self._evict_private(request, tokens=1, min_gain=None):
                return True
        return False

    def decide_again(self, request: Request) -> bool:
        """Drop the evictions under pressure that a resumed request has yet to repeat.

        They fitted when they were made; with pages in other slabs, the tokens before them may not.

        Returns:
            Whether there were any.
        """
        state = request.eviction
        if state.spec.when != PRESSURE or state.next_replay is None:
            return False
        del state.trace[state.replayed :]
        return True

    def _evictable(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests that evict only under pressure, the longest first."""
        lanes = self.lanes
        if lanes is None:
            return
        evictable = [
            r
            for r in requests
            if r.eviction.spec.when == PRESSURE
            and r.eviction.next_replay is None
            and r.progress.num_computed >= r.progress.again_until
            and not r.draft_token_ids
        ]
        for request in sorted(evictable, key=lambda r: (-int(lanes.held(r).sum()), r.order)):
            if request.is_running:
                yield request

    def _evict_private(self, request: Request, *, tokens: int, min_gain: int | None) -> bool:
        """Evict lanes above their cap, unless the request is one of several sequences of a group.

        The pages of a group are counted without evictions: its sequences share all pages of their
        prompt until they end. Evictions move later tokens to other places in their pages, so that
        fewer whole pages are shared, and replays of evictions copy shared pages. The group could
        then need more pages than the memory has.

        Args:
            request: a running request.
            tokens: number of next tokens; with 1, lanes at their cap count as above it.
            min_gain: see `Evictor.evict`.

        Returns:
            Whether slots were evicted, or the request failed and was freed.
        """
        assert self.lanes is not None
        # while every lane is within its cap, their sum is bounded: no division is needed
        if not may_evict(request) or over_cap(request, self.lanes, tokens) is None:
            return False
        if self._sequence_memory.shares_unwritten(request):
            return False
        # evict its cached prefixes first: pages that a cached prefix refers to are not freed
        self._sequence_memory.stop_sharing(request)
        self._sequence_memory.drop_cached()
        division, num_evictions = request.eviction.division, request.eviction.num_evictions
        try:
            if request.eviction.pending:
                self._divide(request)
            keep = over_cap(request, self.lanes, tokens)
            return keep is not None and self._evict(request, keep, PRESSURE, min_gain=min_gain)
        except OutOfPages:
            return False
        except PolicyError as error:
            self._lifecycle.fail(request, error)
            return True
        finally:
            if request.eviction.num_evictions == num_evictions:
                request.eviction.division = division

    def cut_layer(self, request: Request, layer: int) -> Evicted | None:
        """Evict from the lanes of a layer to their caps; None if a recorded eviction is replayed.

        `note_cut` records the evictions of all layers.
        """
        assert self.lanes is not None
        entry, lanes = request.eviction.next_replay, self.lanes.of_layer(layer)
        if entry is not None:
            part = entry.only_of(lanes)
            self._changing(request, lambda: self._evictor.repeat(request, part))
            return None
        keep = np.full(self.lanes.num_lanes, -1, dtype=np.int64)
        caps = lane_capacities(request.eviction.spec, len(keep))
        keep[lanes] = np.minimum(caps, self.lanes.held(request))[lanes]
        return self._changing(request, lambda: self._evictor.evict(request, keep))

    def note_cut(self, request: Request, cut: Sequence[Evicted], freed_bytes: int) -> None:
        """Record the eviction of a prompt whose layers were all cut; without `cut`, its replay."""
        if not cut:
            self._note_replay(request, freed_bytes)
            return
        entries = [one.entry for one in cut if one.entry is not None]
        entry = EvictionEntry.merged(entries) if entries else None
        slots = sum(one.slots for one in cut)
        self._note_eviction(request, Evicted(slots, cut[0].lanes, entry), freed_bytes, CAP)

    def _divide(self, request: Request) -> None:
        """Set the caps of a request's lanes by its cache."""
        self._evictor.finalize(request)
        note_division(request)

    def _try(self, request: Request, change: Callable[[Request], T]) -> T | None:
        """Evict; None if the policy failed or there are no pages for private copies."""
        try:
            return change(request)
        except OutOfPages:
            return None
        except PolicyError as error:
            self._lifecycle.fail(request, error)
            return None

    def _evict_together(
        self, due: Sequence[tuple[Request, Slots]], divisions: Sequence[Division]
    ) -> list[Request]:
        """Evict from requests, at once where possible; return those that could not be evicted.

        Args:
            due: requests, and the slots to retain.
            divisions: of their caps before, for requests that lack pages for private copies.
        """
        if not due:
            return []
        for request, _ in due:
            self._sequence_memory.stop_sharing(request)
        stuck, together = [], self._evictor.evict_together(due)
        for (request, keep), evicted, division in zip(due, together, divisions, strict=True):
            if evicted is not None:
                self._note_copies(request, evicted.copied_bytes)
                self._note_eviction(request, evicted, evicted.freed_bytes or 0, CAP)
                continue
            evict = partial(self._evict, keep=keep, reason=CAP)
            if self._try(request, evict) is None:
                request.eviction.division = division
                stuck.append(request)
        return stuck

    def _keep_due(self, request: Request) -> tuple[bool, Slots | None]:
        """Slots to retain before the next tokens, or None; False: it shares unwritten blocks."""
        assert self.lanes is not None
        done, state = request.progress.num_computed, request.eviction
        if done < state.free_until and state.next_replay is None:
            return True, None
        if self._sequence_memory.shares_unwritten(request):
            return not self._is_due(request), None
        while (entry := request.eviction.next_replay) is not None:
            if entry.num_computed != done:
                return True, None
            self._repeat(request, entry)
        if done < state.divided_tokens:
            return True, None  # recomputed: no eviction was due between the last and the division
        if division_is_due(request, self.lanes, lookahead(request)):
            self._divide(request)
        keep = slots_to_keep(request, self.lanes, lookahead(request))
        if keep is not None:
            return True, None if np.all(keep >= self.lanes.held(request)) else keep
        spec, decodes = state.spec, done >= len(request.prompt_token_ids)
        if decodes and spec.when in (PREFILL_AND_DECODE, DECODE) and not spec.ragged:
            held = self.lanes.held(request)
            state.free_until = done + int((lane_capacities(spec, len(held)) - held).min())
        return True, None

    def _is_due(self, request: Request) -> bool:
        entry = request.eviction.next_replay
        if entry is not None:
            return entry.num_computed == request.progress.num_computed
        assert self.lanes is not None
        tokens = lookahead(request)
        return (
            division_is_due(request, self.lanes, tokens)
            or slots_to_keep(request, self.lanes, tokens) is not None
        )

    def _evict(
        self, request: Request, keep: Slots, reason: str, *, min_gain: int | None = None
    ) -> bool:
        memory = self._sequence_memory.memory
        free_bytes = memory.free_bytes
        evicted = self._changing(
            request, lambda: self._evictor.evict(request, keep, min_gain=min_gain)
        )
        if evicted is None:
            return False
        self._note_eviction(request, evicted, memory.free_bytes - free_bytes, reason)
        return True

    def _note_eviction(
        self, request: Request, evicted: Evicted, freed_bytes: int, reason: str
    ) -> None:
        if evicted.entry is not None:
            request.eviction.trace.append(evicted.entry)
            request.eviction.replayed = len(request.eviction.trace)
        tokens = evicted.slots / evicted.lanes
        request.eviction.exact = False
        request.eviction.num_evictions += 1
        request.eviction.evicted_tokens += tokens
        self.num_evictions += 1
        self.evicted_tokens += tokens
        self._log_eviction(request, tokens, freed_bytes, reason)

    def _repeat(self, request: Request, entry: EvictionEntry) -> None:
        memory = self._sequence_memory.memory
        free_bytes = memory.free_bytes
        self._changing(request, lambda: self._evictor.repeat(request, entry))
        self._note_replay(request, memory.free_bytes - free_bytes)

    def _note_replay(self, request: Request, freed_bytes: int) -> None:
        entry = request.eviction.trace[request.eviction.replayed]
        request.eviction.exact = False
        request.eviction.replayed += 1
        tokens = entry.num_slots / len(entry.counts)
        self._log_eviction(request, tokens, freed_bytes, REPLAY)

    def _changing(self, request: Request, change: Callable[[], T]) -> T:
        """Change lanes; if pages are missing, evict cached prefixes, then offload, and retry."""
        self._sequence_memory.stop_sharing(request)
        copied_bytes = self._sequence_memory.memory.copied_bytes
        while True:
            try:
                changed = change()
                break
            except OutOfPages:
                idle_bytes = self._sequence_memory.idle_bytes
                self._sequence_memory.drop_cached()
                if not (idle_bytes or self._sequence_memory.offload_some()):
                    raise
        self._note_copies(request, self._sequence_memory.memory.copied_bytes - copied_bytes)
        return changed

    def _note_copies(self, request: Request, copied_bytes: int) -> None:
        if copied_bytes:
            self._sequence_memory.events.emit("copied", request, kv_bytes=copied_bytes)

    def _log_eviction(self, request: Request, tokens: float, freed_bytes: int, reason: str) -> None:
        last = (
            request.eviction.trace[request.eviction.replayed - 1]
            if request.eviction.replayed
            else None
        )
        recorded = request.spec.records_evictions
        extra = {"digest": last.digest} if recorded and last is not None else {}
        self._sequence_memory.events.emit(
            "evicted",
            request,
            tokens=round(tokens, 3),
            freed_bytes=freed_bytes,
            reason=reason,
            length=request.progress.num_computed,
            **extra,
        )


# ---- prompts that are computed layer by layer ----------------------------------------------------


class LayerPrefill:
    """Prompts of one step that are computed layer by layer.

    The lanes of a layer grow by all tokens when the layer begins, and are cut to their caps before
    the next layer begins. So the peak is one whole layer and the retained tokens of the others.

        layer 0   grow, chunk, chunk, chunk, evict
        layer 1                                     grow, chunk, chunk, chunk, evict

    Attributes:
        tokens: the tokens of each request.
        scoring: further slots of requests whose prompt is scored, until their layer is cut.
        chunk_tokens: tokens that a layer computes at a time.
        failed: a request whose policy broke its contract, and the error.
    """

    def __init__(
        self, capacities: LaneCapacities, sequence_memory: SequenceMemory, chunk_tokens: int
    ) -> None:
        assert capacities.lanes is not None, "only prompts that evict are computed layer by layer"
        self._capacities, self._lanes = capacities, capacities.lanes
        self._memory, self._prefix = sequence_memory.memory, sequence_memory.prefix
        self.chunk_tokens = chunk_tokens
        self.tokens: dict[Request, int] = {}
        self.scoring: dict[Request, int] = {}
        self.failed: tuple[Request, PolicyError] | None = None
        self._references: dict[Request, LayerReferences] = {}
        self._cut: dict[Request, list[Evicted]] = {}
        self._freed_bytes: Counter[Request] = Counter()
        layout = self._memory.layout
        self._layers = sorted({layer for group in layout.groups for layer in group.layers})
        self._num_begun = self._num_ended = 0
        # further pages [while a layer is computed or afterwards, layers, page classes]
        self._pages = np.zeros((2, len(self._layers), len(layout.page_classes)), dtype=np.int64)

    # ---- planning ------------------------------------------------------------------------------

    def accepts(self, request: Request) -> bool:
        """Whether a request can share forwards with the others."""
        kinds = {(r.spec.rope_variant, r.spec.pre_rope) for r in (*self.tokens, request)}
        return len(kinds) == 1

    def needed_pages(
        self, request: Request, tokens: int, *, publishes: bool
    ) -> dict[PageClass, int]:
        """Most further pages that all prompts and this one take at a time.

        Pages that a lane holds already are counted as shared: a cut copies and does not free them.
        So are all pages if the prompt publishes its blocks.
        """
        return self._peak(self._pages + self._pages_of(request, tokens, publishes=publishes))

    @property
    def promised_pages(self) -> dict[PageClass, int]:
        """Most further pages that all prompts take at a time."""
        return self._peak(self._pages)

    def _peak(self, pages: NDArray[np.int64]) -> dict[PageClass, int]:
        during, after = pages
        most = (np.cumsum(after, axis=0) - after + during).max(axis=0)
        classes = self._memory.layout.page_classes
        return {each: int(pages) for each, pages in zip(classes, most, strict=True)}

    def _pages_of(self, request: Request, tokens: int, *, publishes: bool) -> NDArray[np.int64]:
        row, pages = np.array([request.memory.row]), np.zeros_like(self._pages)
        for table in self._memory.tables.values():
            group, page_class = table.group, table.group.page_class
            counts = np.array([[tokens], [tokens + due_scoring(request, tokens)]], dtype=np.int32)
            grown, scored = (grown_slots(table, row, count[None])[0] for count in counts)
            after = grown
            if group.bounded:
                after = np.minimum(grown, group.slots_at_most(UNLIMITED, 1))
            elif group.records is None:
                caps = lane_capacities(request.eviction.spec, self._lanes.num_lanes)
                after = np.minimum(grown, caps[lane_places(group, self._lanes.layers)])
            held, whole, cut, most = (
                table.num_pages[row[0]],
                *(-(-slots // page_class.tokens) for slots in (grown, after, scored)),
            )
            layers = [self._layers.index(layer) for layer in group.layers]
            column = self._memory.layout.page_classes.index(page_class)
            shared = np.minimum(cut, whole if publishes else held)
            during = after = whole - held + shared
            if not publishes:
                after = cut
            elif group.private:  # statistics are copied for the cache, once per snapshot
                copied = whole * (len(request.memory.snapshot_ends) if group.checkpointed else 0)
                during, after = whole + copied, copied + cut
            for number, lanes in enumerate((during + most - whole, after)):
                pages[number, layers, column] += lanes.reshape(len(layers), -1).sum(axis=1)
        return pages

    def add(self, request: Request, tokens: int, *, publishes: bool) -> None:
        """Add a prompt; `publishes`: its blocks are published in the prefix cache."""
        self._pages += self._pages_of(request, tokens, publishes=publishes)
        self.tokens[request], scoring = tokens, due_scoring(request, tokens)
        if scoring:
            self.scoring[request] = scoring
        if publishes:
            assert self._prefix is not None
            assert request.memory.lease is not None
            self._references[request] = self._prefix.publish_by_layer(
                request.memory.lease, request.memory.row, len(request.prompt_token_ids)
            )
        row = np.array([request.memory.row])
        self._memory.drop_behind_windows(row)
        self._memory.lengths[row] += tokens

    # ---- the step ------------------------------------------------------------------------------

    def snapshot_ends(self, request: Request) -> tuple[int, ...]:
        """Token counts after which the statistics of each layer are copied for the prefix cache."""
        return request.memory.snapshot_ends if request in self._references else ()

    def begin(self, layer: int, computed: Mapping[Request, int] | None = None) -> None:
        """End the layers before this one, then allocate its slots; idempotent.

        Args:
            layer: the layer.
            computed: requests of the next chunk, and their tokens that the layer has computed.

        Raises:
            PolicyError: a policy broke its contract; see `failed`.
        """
        while self._num_begun < len(self._layers) and self._layers[self._num_begun] <= layer:
            self._end_layer()
            grown = [tokens + self.scoring.get(r, 0) for r, tokens in self.tokens.items()]
            counts = np.array(grown, dtype=np.int32)
            for request, slots in self.scoring.items():
                self._memory.lengths[request.memory.row] += slots
            self._memory.grow_layer(self._rows, counts, self._layers[self._num_begun])
            self._num_begun += 1
        for request, tokens in (computed or {}).items():
            if tokens in self.snapshot_ends(request):
                self._references[request].add_statistics(layer, tokens)

    def end(self) -> None:
        """End the last layer; a simulation computes none, so layers that have not begun begin."""
        self.begin(self._layers[-1])
        self._end_layer()

    def record(self) -> None:
        """Record the evictions after `end`, and publish the blocks."""
        for request in self.tokens:
            self._capacities.note_cut(request, self._cut[request], self._freed_bytes[request])
        for request, references in self._references.items():
            assert self._prefix is not None
            self._prefix.publish_layers(references, request.memory.row, request.prompt_token_ids)

    @property
    def _rows(self) -> NDArray[np.int64]:
        return np.array([request.memory.row for request in self.tokens], dtype=np.int64)

    def _end_layer(self) -> None:
        if self._num_ended == self._num_begun:
            return
        layer, memory, lanes = self._layers[self._num_ended], self._memory, self._lanes
        self._num_ended += 1
        for request, slots in self.scoring.items():
            memory.truncate_layer(request.memory.row, slots, layer)
            memory.lengths[request.memory.row] -= slots
        for references in self._references.values():
            references.add(layer)
        memory.drop_behind_windows(self._rows, layer)
        for request in self.tokens if layer in lanes.layers else ():
            free_bytes = memory.free_bytes
            try:
                cut = self._capacities.cut_layer(request, layer)
            except PolicyError as error:
                self.failed = request, error
                raise
            self._freed_bytes[request] += memory.free_bytes - free_bytes
            self._cut.setdefault(request, []).extend([] if cut is None else [cut])
