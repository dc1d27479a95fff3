"""Engines under memory pressure, with checks after each step.

Slots that are not live are poisoned, swapped pages are compared byte for byte, and logits with a
forward pass over the tokens of one request alone.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.kv.swap import Swapped
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo

POISON = 0xFF  # four of them are a float32 NaN
PAGE_TOKENS = 4
STEPS = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "chunk_tokens": 8}
LONGEST_PROMPT, MAX_NEW_TOKENS = 40, 10
TENANTS = ("a", "b")


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str


def make_jobs(count: int, seed: int) -> list[Job]:
    """Prompts with shared prefixes; one output, several sampled outputs, or beams."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(17)] for _ in range(3)]
    return [_make_job(rng, beginnings, number) for number in range(count)]


def _make_job(rng: random.Random, beginnings: list[list[int]], number: int) -> Job:
    prompt = list(rng.choice([[], *beginnings]))
    rest = rng.randint(1, LONGEST_PROMPT - len(prompt))
    prompt += [rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(rest)]
    kind = rng.choice([{}, {}, {}, {"n": 2}, {"n": 3}, {"use_beam_search": True, "beam_width": 2}])
    temperature = None if "use_beam_search" in kind else rng.choice([0.0, 1.0])
    drawn = {"temperature": temperature, "seed": None if temperature is None else number}
    max_tokens = rng.randint(1, MAX_NEW_TOKENS)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **drawn, **kind)
    return Job(prompt, params, rng.randint(-1, 1), rng.choice(TENANTS))


def largest_job() -> Job:
    """A job that needs at least as much memory as any of `make_jobs`."""
    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, use_beam_search=True, beam_width=2)
    return Job([2] * LONGEST_PROMPT, params, 0, TENANTS[0])


def engine_under(
    model: LoadedModel, room: float, *, host_room: float = 0.0, **schedule: object
) -> Engine:
    """An engine whose arena holds `room` of the largest request, its swap space `host_room`."""
    config = ScheduleConfig(**STEPS, admission="optimistic", **schedule)
    smallest = _smallest_memory(model)
    sizes = {"memory": int(room * smallest), "swap_space": int(host_room * smallest)}
    return Engine(model, KVConfig(page_tokens=PAGE_TOKENS, **sizes), config)


def _smallest_memory(model: LoadedModel) -> int:
    """Bytes of the smallest arena, within 2 %, that can run the largest job."""
    if model.name not in _SMALLEST:
        sizes = [int(1.02**step * (1 << 12)) for step in range(400)]
        _SMALLEST[model.name] = sizes[bisect_left(sizes, True, key=partial(_takes_all, model))]
    return _SMALLEST[model.name]


_SMALLEST: dict[str, int] = {}  # by architecture


def _takes_all(model: LoadedModel, size: int) -> bool:
    try:
        kv = KVConfig(memory=size, page_tokens=PAGE_TOKENS)
        engine = Engine(model, kv, ScheduleConfig(**STEPS))
        submit(engine, largest_job(), "largest")
    except (NeverFits, ValueError):  # not a token fits, or not the whole job
        return False
    return True


def submit(engine: Engine, job: Job, request_id: str) -> None:
    own = {"request_id": request_id, "priority": job.priority, "tenant": job.tenant}
    engine.submit(GenerationRequest(job.prompt, job.params, **own))


# ---- checks ------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Logits of an engine's steps, each with all the tokens they follow."""

    runner: object
    logits: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def run(self, plan):
        results = self.runner.run(plan)
        for result in results:
            for i, row in enumerate(result.logits):
                tokens = tuple(result.request.token_ids(0, result.first_position + i + 1))
                self.logits.setdefault(tokens, []).append(row.cpu().clone())
        return results

    def worst_difference(self, architecture: str) -> float:
        """Largest difference from a forward pass over each text; NaN if a logit is NaN."""
        texts = sorted(self.logits)
        pairs = zip(texts, [*texts[1:], ()], strict=True)
        whole = [text for text, after in pairs if after[: len(text)] != text]
        model, worst = zoo.build(architecture), torch.tensor(0.0)
        forwards: dict[tuple[int, ...], torch.Tensor] = {}
        for text in texts:
            longest = whole[bisect_left(whole, text)]
            if longest not in forwards:
                with torch.inference_mode():
                    out = model(torch.tensor([longest]), use_cache=False).logits[0]
                forwards = {longest: out}
            for row in self.logits[text]:
                worst = torch.maximum(worst, (row - forwards[longest][len(text) - 1]).abs().max())
        return float(worst)


@dataclass
class SameBytes:
    """Wrapper of a swapper: pages swapped in equal the pages swapped out, byte for byte."""

    swapper: object
    memory: KVMemory
    store: PageStore
    swapped_out: dict[int, list[list[bytes]]] = field(default_factory=dict)
    num_compared: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.swapper, name)

    def swap_out(self, requests, choice):
        before = [
            list(stored_pages(self.memory, self.store, request.memory.row, choice.keep_from))
            for request in requests
        ]
        swapped = self.swapper.swap_out(requests, choice)
        if swapped is not None:
            self.swapped_out[id(swapped)] = before
        return swapped

    def swap_in(self, swapped: Swapped):
        before = self.swapped_out.pop(id(swapped))
        rows = self.swapper.swap_in(swapped)
        self._compare(before, rows or [])
        return rows

    def swap_in_tail(self, swapped: Swapped, row: int):
        before = self.swapped_out.pop(id(swapped))
        done = self.swapper.swap_in_tail(swapped, row)
        self._compare(before, [row] if done else [], swapped.keep_from)
        return done

    def _compare(self, before: list[list[bytes]], rows: list[int], keep_from: int = 0) -> None:
        for pages, row in zip(before, rows, strict=False):
            assert list(stored_pages(self.memory, self.store, row, keep_from)) == pages
            self.num_compared += 1


def stored_pages(
    memory: KVMemory, store: PageStore, row: int, keep_from: int = 0
) -> Iterator[bytes]:
    """The bytes of a row's pages from a token on, lane by lane."""
    for table in memory.tables.values():
        page_class = table.group.page_class
        whole, head = store.views(page_class).whole, keep_from // page_class.tokens
        for lane in range(table.group.num_lanes):
            pages = table.pages[row, lane][head : table.num_pages[row, lane]]
            yield whole[torch.from_numpy(pages.astype(np.int64))].numpy().tobytes()


def poison(memory: KVMemory, store: PageStore) -> None:
    """Overwrite everything that is not live: free pages and slots that are not written."""
    in_use = torch.zeros(len(store.arena), dtype=torch.bool)
    for page_class, pool in memory.pools.items():
        size = page_class.page_bytes
        pages = in_use[: len(in_use) // size * size].view(-1, size)
        pages[torch.from_numpy(np.flatnonzero(pool.ref_counts))] = True
    store.arena[~in_use] = POISON
    written = {c: np.zeros(len(pool.ref_counts), np.int64) for c, pool in memory.pools.items()}
    for cached_reference in memory.cached_references.values():
        for name, pages in cached_reference.items():
            page_class = memory.tables[name].group.page_class
            written[page_class][pages.reshape(-1)] = page_class.tokens
    for table in memory.tables.values():
        _note_written(table, memory.live_rows, written[table.group.page_class])
    for page_class, slots in written.items():
        views = store.views(page_class)
        for page in np.flatnonzero((slots > 0) & (slots < page_class.tokens)):
            for plane in (views.key, views.value):
                plane[page, :, slots[page] :] = float("nan")


def _note_written(table, rows, slots) -> None:
    tokens = table.group.page_class.tokens
    for row in rows:
        for lane in range(table.group.num_lanes):
            held = int(table.num_slots[row, lane])
            pages = table.pages[row, lane][: table.num_pages[row, lane]]
            count = np.minimum(tokens, held - tokens * np.arange(len(pages)))
            np.maximum.at(slots, pages, count)


# ---- a run -------------------------------------------------------------------------------------


@dataclass
class Watched:
    """An engine under load, checked after every step."""

    engine: Engine
    poisoned: bool = True
    ended: dict[str, list[str]] = field(default_factory=dict)
    swapped_out: int = 0
    ways: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        engine = self.engine
        self.memory, self.store = engine.pool.kv.memory, engine.pool.kv.store
        self.seen = engine.runner = Seen(engine.runner)
        preempter = engine.scheduler.preempter
        self.same = preempter.swapper = SameBytes(preempter.swapper, self.memory, self.store)
        engine.events.subscribe(self._hear)

    def _hear(self, event) -> None:
        if event.kind == "preempted":
            self.ways.add(event.data["how"])
        self.swapped_out += event.kind == "swapped_out"

    def step(self) -> None:
        try:
            deltas = self.engine.step()
        finally:
            self.check()
        for delta in deltas:
            assert delta.error is None, delta.error
            if delta.finish_reason:
                self.ended.setdefault(delta.request_id, []).append(delta.finish_reason)

    def check(self) -> None:
        """Verify the accounts; poison everything that is not live."""
        self.engine.check()
        self.engine._ledger.check()
        if self.engine.pool.host is not None:
            self.engine.pool.host.check()
        if self.poisoned:
            poison(self.memory, self.store)

    def assert_nothing_is_held(self) -> None:
        """An engine without work holds cached prefixes only."""
        scheduler, memory = self.engine.scheduler, self.memory
        assert not scheduler.has_work
        assert not len(memory.live_rows)
        assert self.engine.pool.host is None or not self.engine.pool.host.used_bytes
        scheduler.sequence_memory.drop_cached()
        assert not memory.cached_references
        assert memory.arena.num_free_slabs == memory.arena.num_slabs


def drive(watched: Watched, jobs: list[Job], seed: int, *, cancelled: float = 0.1) -> None:
    rng = random.Random(seed)
    waiting = [(f"r{i}", job) for i, job in enumerate(jobs)]
    rng.shuffle(waiting)
    doomed = [name for name, _ in waiting if rng.random() < cancelled]
    engine = watched.engine
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 4)):
            if waiting:
                name, job = waiting.pop()
                submit(engine, job, name)
        watched.step()
        if doomed and rng.random() < 0.2:
            index = rng.choice([None, 0, 1])
            engine.cancel(rng.choice(doomed), index)
    assert sorted(watched.ended) == sorted(f"r{i}" for i in range(len(jobs)))
    watched.assert_nothing_is_held()
