"""Batches that shrink before memory runs full, and grow again; over a memory without bytes."""

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.scheduler.batchers.registry import BATCHERS
from quire.scheduler.preemption.limits import SCALED_DOWN
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import greedy, load
from unit.scheduler.scheduler_load import SchedulerLoad, Setting

MARK, ROWS, COUNT = 0.6, 6, 14


class Watched:
    """A load whose use of memory is read in every step, before growth and after it."""

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
        self.load.scheduler.sequence_memory.events.subscribe(self._hear)
        self._begin = self.load.scheduler.components.batcher.begin
        self.load.scheduler.components.batcher.begin = self._reads_use

    def _hear(self, event):
        if event.kind == "preempted":
            self.reasons.append(event.data["reason"])
            self.ways.append(event.data["how"])

    @property
    def used_share(self):
        memory = self.load.memory
        return 1 - self.load.scheduler.sequence_memory.sharing.available_bytes / memory.total_bytes

    def _reads_use(self):
        self.before.append(self.used_share if len(self.load.scheduler.running) > 1 else 0.0)
        return self._begin()

    def run(self):
        for number in range(COUNT):
            assert self.load.submit(self.load.request(8 + number % 5, 30))
        commit = self.load.scheduler.commit

        def committed(plan):
            self.after.append(self.used_share)
            self.rows.append(len(self.load.scheduler.running))
            return commit(plan)

        self.load.scheduler.commit = committed
        self.load.drain()
        return self


@pytest.fixture(scope="module")
def peak_pages():
    """Pages of the memory of which an unconstrained run takes nearly all."""
    free = Watched("continuous", pages=300, host_pages=0, scale_down_at=None).run()
    return int(300 * max(free.after)) + 2


@pytest.mark.parametrize("host_pages", [300, 10, 0])
@pytest.mark.parametrize("batcher", BATCHERS)
def test_use_passes_the_mark_by_the_growth_of_a_step_at_most(batcher, host_pages, peak_pages):
    """With room on the host, with too little of it, and with none: nobody is lost."""
    run = Watched(batcher, pages=peak_pages, host_pages=host_pages, scale_down_at=MARK).run()

    assert max(run.before) <= MARK
    growth = [after - before for before, after in zip(run.before, run.after, strict=True)]
    assert max(g for g, b in zip(growth, run.before, strict=True) if b) < 0.25
    assert max(run.after) > MARK - 0.1  # it was worth a mark
    assert set(run.reasons) == {SCALED_DOWN}
    assert set(run.ways) == ({"swap"} if host_pages == 300 else set(run.ways))


def test_the_batch_shrinks_and_grows_again(peak_pages):
    run = Watched("continuous", pages=peak_pages, host_pages=300, scale_down_at=MARK).run()
    rows = run.rows[: -2 * ROWS]
    shrinks = [i for i in range(1, len(rows)) if rows[i] < rows[i - 1]]
    grows = [i for i in range(1, len(rows)) if rows[i] > rows[i - 1]]

    assert shrinks
    assert any(grow > shrinks[0] for grow in grows)
    assert run.load.scheduler.num_preemptions < COUNT  # nobody goes in and out in circles


def test_one_that_is_larger_than_the_mark_runs_alone(peak_pages):
    run = Watched("continuous", pages=peak_pages, host_pages=300, scale_down_at=0.1)
    run.run()

    assert max(run.rows) < ROWS


@pytest.mark.parametrize("mark", [0.0, 1.5])
def test_a_mark_is_a_part_of_the_memory(mark):
    with pytest.raises(ConfigError, match="expected scale_down_at above 0 and up to 1"):
        ScheduleConfig(scale_down_at=mark)


def test_who_comes_back_does_not_hold_cached_pages_that_have_it_taken_out_again():
    """It has a copy of its own; what the prefix cache holds of it can be dropped."""
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

    assert 1 <= engine.stats().num_preemptions <= len(lengths)  # 39 when it held them
