"""Batches that shrink before memory is full, and grow again, over a KV memory without bytes."""

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.scheduler.batchers import BATCHERS
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCALED_DOWN
from support.engines import greedy, load
from support.scheduler_load import SchedulerLoad, Setting

SCALE_DOWN_AT, ROWS, NUM_REQUESTS = 0.6, 6, 14


class RecordedLoad:
    """A load that records its memory use in every step, before and after growth."""

    def __init__(self, batcher, *, pages, host_pages, scale_down_at):
        self.load = SchedulerLoad(
            Setting(
                batcher=batcher,
                pages=pages,
                host_pages=host_pages,
                scale_down_at=scale_down_at,
                max_num_seqs=ROWS,
                max_num_batched_tokens=40,
            )
        )
        self.before, self.after, self.rows = [], [], []
        self.reasons, self.ways = [], []
        self.load.scheduler.sequence_memory.events.subscribe(self._record_event)
        self._begin = self.load.scheduler.batcher.begin
        self.load.scheduler.batcher.begin = self._record_use

    def _record_event(self, event):
        if event.kind == "preempted":
            self.reasons.append(event.data["reason"])
            self.ways.append(event.data["how"])

    @property
    def used_fraction(self):
        memory = self.load.memory
        return 1 - self.load.scheduler.sequence_memory.available_bytes / memory.total_bytes

    def _record_use(self):
        self.before.append(self.used_fraction if len(self.load.scheduler.running) > 1 else 0.0)
        return self._begin()

    def run(self):
        for number in range(NUM_REQUESTS):
            assert self.load.submit(self.load.request(8 + number % 5, 30))
        commit = self.load.scheduler.commit

        def committed(plan):
            self.after.append(self.used_fraction)
            self.rows.append(len(self.load.scheduler.running))
            return commit(plan)

        self.load.scheduler.commit = committed
        self.load.drain()
        return self


@pytest.fixture(scope="module")
def peak_pages():
    """The memory size, in pages, that an unconstrained run nearly fills."""
    free = RecordedLoad("continuous", pages=300, host_pages=0, scale_down_at=None).run()
    return int(300 * max(free.after)) + 2


@pytest.mark.parametrize("host_pages", [300, 10, 0])
@pytest.mark.parametrize("batcher", BATCHERS)
def test_memory_use_exceeds_scale_down_at_by_at_max_one_step_of_growth(
    batcher, host_pages, peak_pages
):
    """With ample, little and no swap space: all requests complete."""
    run = RecordedLoad(
        batcher, pages=peak_pages, host_pages=host_pages, scale_down_at=SCALE_DOWN_AT
    ).run()

    assert max(run.before) <= SCALE_DOWN_AT
    growth = [after - before for before, after in zip(run.before, run.after, strict=True)]
    assert max(g for g, b in zip(growth, run.before, strict=True) if b) < 0.25
    assert max(run.after) > SCALE_DOWN_AT - 0.1  # the limit was reached
    assert set(run.reasons) == {SCALED_DOWN}
    assert set(run.ways) == ({"swap"} if host_pages == 300 else set(run.ways))


def test_batch_shrinks_and_grows_again(peak_pages):
    run = RecordedLoad(
        "continuous", pages=peak_pages, host_pages=300, scale_down_at=SCALE_DOWN_AT
    ).run()
    rows = run.rows[: -2 * ROWS]
    shrinks = [i for i in range(1, len(rows)) if rows[i] < rows[i - 1]]
    grows = [i for i in range(1, len(rows)) if rows[i] > rows[i - 1]]

    assert shrinks
    assert any(grow > shrinks[0] for grow in grows)
    assert run.load.scheduler.num_preemptions < NUM_REQUESTS  # no request is preempted repeatedly


def test_request_larger_than_scale_down_at_runs_alone(peak_pages):
    run = RecordedLoad("continuous", pages=peak_pages, host_pages=300, scale_down_at=0.1)
    run.run()

    assert max(run.rows) < ROWS


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_scale_down_at_outside_0_to_1_is_rejected(fraction):
    with pytest.raises(ConfigError, match="expected scale_down_at above 0 and up to 1"):
        ScheduleConfig(scale_down_at=fraction)


def test_resumed_request_does_not_hold_cached_pages_that_cause_its_preemption():
    """It has a copy of its own; the same tokens in the prefix cache can be evicted."""
    kv = KVConfig(memory=65_536, page_tokens=4, swap_space=20_000)
    schedule = ScheduleConfig(
        max_num_seqs=3, max_num_batched_tokens=6, chunk_tokens=16, scale_down_at=0.3
    )
    engine = Engine(load("mistral"), kv, schedule)
    lengths = (5, 40, 24, 30, 8, 40, 26, 33)
    for number, tokens in enumerate(lengths):
        engine.submit(GenerationRequest([3 + number] * tokens, greedy(29)))

    while engine.has_work:
        engine.step()
        engine.check()

    assert 1 <= engine.stats().num_preemptions <= len(lengths)  # 39 if it holds the cached pages
