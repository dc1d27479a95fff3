"""The guarantees of each batcher, step by step, and batches that shrink before memory is full."""

from types import SimpleNamespace

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.scheduler import batchers
from quire.scheduler.batchers import BATCHERS, DENSE_BATCHERS, parse_dense_batcher
from quire.scheduler.batchers.base import BatchView, is_prefilled, unit_of
from quire.scheduler.request import RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCALED_DOWN
from support.engines import greedy, load
from support.scheduler_load import SchedulerLoad, Setting

ROWS = 3
ALL_BATCHERS = [*BATCHERS, "baton_pd:prefill=sync", "baton_pd:hold=host", "pd:ahead=5"]


def load_of(batcher, **setting):
    ample = {"pages": 400, "max_num_seqs": ROWS, "max_num_batched_tokens": 40, "host_pages": 400}
    return SchedulerLoad(Setting(batcher=batcher, **ample | setting))


def run_steps(load, count):
    for _ in range(count):
        load.step()


def submit(load, *jobs, priority=0):
    """Submit requests given as (prompt tokens, output tokens)."""
    found = [load.request(prompt, output, priority) for prompt, output in jobs]
    assert all(map(load.submit, found))
    return found


def steps(load):
    """Run to the end; return for each plan {request id: tokens} and the ids that decoded."""
    plans, schedule = [], load.scheduler.schedule

    def recorded_schedule():
        plan = schedule()
        ids = [request.request_id for request in plan.requests]
        plans.append((dict(zip(ids, plan.tokens, strict=True)), ids[: plan.num_decoding]))
        return plan

    load.scheduler.schedule = recorded_schedule
    load.drain()
    return plans


JOBS = [(6, 3), (8, 9), (5, 5), (20, 4), (7, 2), (19, 6), (4, 4)]


def test_static_and_pd_batches_prefill_by_their_rules():
    load = load_of("static")
    names, plans, spans = [r.request_id for r in submit(load, *JOBS)], steps(load), {}
    for number, (tokens, _) in enumerate(plans):
        for name in tokens:
            spans.setdefault(name, [number, number])[1] = number

    ends = [spans[name][1] for name in names[:ROWS]]
    assert min(spans[name][0] for name in names[ROWS : 2 * ROWS]) > max(ends)
    assert len(set(ends)) > 1  # outputs are returned as they end
    assert all(not decoding or len(tokens) == len(decoding) for tokens, decoding in plans)

    load = load_of("pd")
    lengths = {r.request_id: len(r.prompt_token_ids) for r in submit(load, *JOBS)}
    entered = dict.fromkeys(name for tokens, _ in steps(load) for name in tokens)
    # the first and the nearest in length to 6; then the next waiting and the nearest to 20
    assert [lengths[name] for name in entered] == [6, 5, 7, 8, 4, 19, 20]


def test_orca_fills_a_free_row_at_once_and_splits_no_prompt():
    load = load_of("orca")
    requests = submit(load, *JOBS)
    plans = steps(load)

    for request in requests:
        own = [tokens[request.request_id] for tokens, _ in plans if request.request_id in tokens]
        assert own[0] == len(request.prompt_token_ids)
    left = len(JOBS)
    for tokens, _ in plans[:-6]:
        assert len(tokens) == ROWS or left <= ROWS
        left = len(load.requests)


def test_orca_prefills_whole_and_sync_decodes_no_request_while_the_queue_is_filled():
    plans = {}
    for batcher in ("continuous", "orca"):
        load = load_of(batcher, max_num_batched_tokens=24)
        requests = submit(load, (20, 3), (18, 3))
        plans[batcher] = [tokens.get(requests[1].request_id) for tokens, _ in steps(load)]

    assert plans["continuous"][0] == 4
    assert plans["orca"][:2] == [None, 18]
    load = load_of("baton_pd:prefill=sync")
    submit(load, *JOBS * 2)
    plans = steps(load)
    assert all(len(tokens) == len(decoding) or not decoding for tokens, decoding in plans)
    assert sum(not decoding for _, decoding in plans) < len(plans) / 2


@pytest.mark.parametrize("batcher", ["baton_pd", "baton_pd_best_fit", "baton_pd:tokens=3"])
def test_no_row_is_idle_while_the_prefilled_queue_has_requests(batcher):
    load = load_of(batcher)
    submit(load, *JOBS * 4)
    decodes, schedule, queued_steps = [], load.scheduler.schedule, 0

    def recorded_schedule():
        nonlocal queued_steps
        queue = {unit_of(r) for r in load.scheduler.running if is_prefilled(unit_of(r))}
        plan = schedule()
        if len(queue) > plan.num_decoding:
            queued_steps += 1
            decodes.append(plan.num_decoding)
        return plan

    load.scheduler.schedule = recorded_schedule
    load.drain()

    assert set(decodes) == {ROWS}
    assert queued_steps > 10


def test_tokens_and_queue_of_the_option_are_the_most():
    load = load_of("baton_pd:tokens=3")
    submit(load, *JOBS)
    full = [sum(tokens.values()) for tokens, decoding in steps(load) if len(decoding) == ROWS]
    assert max(full) <= ROWS + 3
    load, most = load_of("baton_pd:queue=2"), 0
    submit(load, *JOBS * 3)
    while load.scheduler.has_work:
        load.step()
        most = max(most, len(load.scheduler.running))
    assert most == ROWS + 2


def test_queued_kv_is_swapped_out_and_in_again_before_a_row_ends():
    """Of a queue of three one stays resident and two are swapped; none counts as preempted."""
    load = load_of("baton_pd:hold=host,lead=2")
    requests = submit(load, *[(6, 12)] * 9)
    on_host, late = 0, []
    while load.scheduler.has_work:
        load.step()
        swapped = [r for r in requests if r.memory.swapped is not None]
        on_host = max(on_host, len(swapped))
        running = load.scheduler.running
        ready = [r for r in running if r.num_uncomputed == 1 and r.output_token_ids]
        late.append(bool(swapped) and len(ready) < ROWS)
        load.check()

    assert on_host == 2
    assert not any(late[3:])
    assert load.scheduler.num_preemptions == 0
    assert not load.pool.used_bytes


def test_best_fit_takes_the_longest_that_fits_and_patience_prevents_starvation():
    load = load_of("baton_pd_best_fit:patience=2,queue=9", max_num_seqs=2)
    first, _ = submit(load, (12, 30), (4, 3))
    load.step()
    rest = submit(load, (40, 2), (5, 2), (9, 2), (14, 2), (11, 2), (3, 2))
    order = list(dict.fromkeys(name for _, decoding in steps(load) for name in decoding))
    # 14 and its first token fit the 16 of the first; then 11; then 40 has been overtaken twice
    assert order[0] == first.request_id
    assert order[2:5] == [r.request_id for r in (rest[3], rest[4], rest[0])]


# ---- urgency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batcher", ["continuous", "orca", *ALL_BATCHERS[4:7]])
@pytest.mark.parametrize("pages", [400, 14])
def test_urgent_request_is_prefilled_in_the_next_step(batcher, pages):
    for priority in (-1, -2):
        load = load_of(batcher, urgent=-1, pages=pages)
        submit(load, *[(8, 12)] * 5)
        run_steps(load, 4)
        [urgent] = submit(load, (10, 3), priority=priority)
        plans = steps(load)

        own = [tokens.get(urgent.request_id, 0) for tokens, _ in plans]
        assert own[:3] == [10, 1, 1]


def test_no_request_is_preempted_if_its_pages_can_stay_or_that_would_not_admit_the_urgent_one():
    load = load_of("baton_pd:queue=4", urgent=-1)
    submit(load, *[(8, 12)] * 4)
    run_steps(load, 4)
    submit(load, (10, 3), priority=-1)
    load.drain()
    assert load.scheduler.num_preemptions == 0
    load = load_of("continuous", urgent=-1)
    submit(load, *[(8, 12)] * ROWS, priority=-1)
    load.step()
    submit(load, (10, 3), priority=-1)
    submit(load, (10, 3), priority=0)
    load.drain()
    assert load.scheduler.num_preemptions == 0


@pytest.mark.parametrize("batcher", ["baton_pd:queue=8", "baton_pd_best_fit:queue=8"])
def test_urgent_request_is_admitted_after_a_group_in_the_batch_has_ended(batcher):
    load = load_of(batcher, urgent=-1)
    group = [load.request(6, 4) for _ in range(ROWS)]
    load.submit_group(list(group), atomic=False)
    while any(len(member.output_token_ids) < 3 for member in group):
        load.step()
    submit(load, *[(5, 3)] * (ROWS + 1), priority=-1)
    load.step()  # prefills more urgent requests than there are rows; the group ends
    [urgent] = submit(load, (5, 3), priority=-1)
    load.step()

    assert all(member.progress.state is RequestState.FINISHED for member in group)
    assert urgent.output_token_ids
    load.drain()


def test_no_request_is_displaced_if_that_would_not_free_enough_rows():
    load = load_of("baton_pd:queue=4", urgent=-1)
    submit(load, (6, 30), (6, 30), priority=-1)
    [ordinary] = submit(load, (6, 4))
    run_steps(load, 2)
    wide = [load.request(5, 2, -1) for _ in range(2)]
    load.submit_group(wide, atomic=False)
    run_steps(load, 3)

    assert ordinary.progress.state is RequestState.FINISHED
    load.drain()


@pytest.mark.parametrize("batcher", ["baton_pd", "baton_pd_best_fit"])
def test_preempted_group_gives_its_rows_to_the_queue_of_a_limited_tenant(batcher):
    """Else it would resume at once, exceed the limit, and be preempted, forever.

    The limit is half of the memory. The queued request holds pages and needs a row to end.
    """
    load = load_of(batcher, pages=30, max_num_seqs=2, host_pages=0, guaranteed=30, burst=50)
    group = [load.request(6, 12, priority=1) for _ in range(2)]
    load.submit_group(list(group), atomic=False)
    run_steps(load, 3)
    submit(load, (15, 8))

    load.drain()  # fails if the load thrashes

    assert 0 < group[0].progress.num_preemptions < 12


# ---- option text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("batn_pd", UnknownName, "did you mean baton_pd"),
        ("baton", UnsoundCombination, r"use baton_pd here, or use quire\.hf\.DynamicBatch"),
        ("baton_pd:lines=3", UnknownName, "option of batcher 'baton_pd' 'lines'"),
        ("baton_pd:queue", ConfigError, "expected option=value such as queue=8"),
        ("baton_pd:queue=2,queue=3", ConfigError, "is repeated"),
        ("baton_pd:queue=-1", ConfigError, "expected queue >= 0, got -1"),
        ("baton_pd:queue=some", ConfigError, "option queue needs a whole number"),
        ("baton_pd:hold=disk", UnknownName, "location of prefilled KV"),
        ("baton_pd_best_fit:prefill=never", UnknownName, "prefill mode"),
        ("pd:window=0", ConfigError, "expected window >= 1"),
        ("static:queue=1", UnknownName, "of batcher 'static' 'queue': there is none; leave it out"),
        ("static:", ConfigError, "expected option=value"),
    ],
)
def test_invalid_batcher_text_is_rejected_by_the_config(text, error, message):
    with pytest.raises(error, match=message):
        ScheduleConfig(batcher=text)


def test_limits_of_numbers_and_batchers_of_pages_and_dense_rows():
    rows = "expected max_num_batched_tokens > max_num_seqs, got 8 and 8"
    with pytest.raises(ConfigError, match=rows):
        ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=8, urgent=0)
    for fraction in (0.0, 1.5):
        with pytest.raises(ConfigError, match="expected scale_down_at above 0 and up to 1"):
            ScheduleConfig(scale_down_at=fraction)
    found = {text: batchers.parse_batcher(text).num_rows(4) for text in ALL_BATCHERS}
    assert found["continuous"] == found["static"] == found["orca"] == found["pd"] == 4
    assert found["baton_pd"] == found["baton_pd_best_fit"] == 8
    assert found["pd:ahead=5"] == 5

    assert set(BATCHERS) ^ set(DENSE_BATCHERS) == {"continuous", "baton"}
    assert all(DENSE_BATCHERS[name] is BATCHERS[name] for name in set(BATCHERS) - {"continuous"})


# ---- dense rows --------------------------------------------------------------------------------


def test_best_fit_takes_the_longest_that_adds_no_dense_columns():
    """Patience limits how often a request is overtaken."""
    ready = [
        SimpleNamespace(number=number, num_to_read=tokens, priority=0)
        for number, tokens in ((0, 9), (1, 4), (2, 6), (3, 6))
    ]

    def chosen(text, columns, ready):
        view = {"size": 4, "live": (), "waiting": (), "columns": columns, "group_tokens": 256}
        return parse_dense_batcher(text).choose(BatchView(ready=ready, **view)).number

    assert [chosen("baton_pd_best_fit", columns, ready) for columns in (6, 3)] == [2, 1]
    del ready[2]
    assert [chosen(f"baton_pd_best_fit:patience={n}", 6, ready) for n in (2, 3)] == [0, 3]


# ---- batches that shrink -------------------------------------------------------------------------

SCALE_DOWN_AT, MANY, NUM_REQUESTS = 0.6, 6, 14


class RecordedLoad:
    """A load that records its memory use in every step, before and after growth."""

    def __init__(self, batcher, **setting):
        self.load = load_of(batcher, max_num_seqs=MANY, **setting)
        scheduler, self.before, self.after, self.rows = self.load.scheduler, [], [], []
        self.reasons, self.ways = [], []
        scheduler.sequence_memory.events.subscribe(self._record_event)
        begin, commit = scheduler.batcher.begin, scheduler.commit

        def recorded_begin():
            self.before.append(self.used_fraction if len(scheduler.running) > 1 else 0.0)
            return begin()

        def recorded_commit(plan):
            self.after.append(self.used_fraction)
            self.rows.append(len(scheduler.running))
            return commit(plan)

        scheduler.batcher.begin, scheduler.commit = recorded_begin, recorded_commit
        submit(self.load, *((8 + number % 5, 30) for number in range(NUM_REQUESTS)))
        self.load.drain()

    def _record_event(self, event):
        if event.kind == "preempted":
            self.reasons.append(event.data["reason"])
            self.ways.append(event.data["how"])

    @property
    def used_fraction(self):
        free_bytes = self.load.scheduler.sequence_memory.available_bytes
        return 1 - free_bytes / self.load.memory.total_bytes


@pytest.fixture(scope="module")
def peak_pages():
    free = RecordedLoad("continuous", pages=300, host_pages=0)
    return int(300 * max(free.after)) + 2


@pytest.mark.parametrize("host_pages", [300, 10, 0])
@pytest.mark.parametrize("batcher", BATCHERS)
def test_memory_use_exceeds_scale_down_at_by_at_max_one_step_of_growth(
    batcher, host_pages, peak_pages
):
    """With ample, little and no swap space: all requests complete."""
    memory = {"pages": peak_pages, "host_pages": host_pages}
    run = RecordedLoad(batcher, **memory, scale_down_at=SCALE_DOWN_AT)

    assert max(run.before) <= SCALE_DOWN_AT
    growth = [after - before for before, after in zip(run.before, run.after, strict=True)]
    assert max(g for g, b in zip(growth, run.before, strict=True) if b) < 0.25
    assert max(run.after) > SCALE_DOWN_AT - 0.1  # the limit was reached
    assert set(run.reasons) == {SCALED_DOWN}
    assert set(run.ways) == ({"swap"} if host_pages == 300 else set(run.ways))


def test_batch_shrinks_and_grows_again(peak_pages):
    memory = {"pages": peak_pages, "host_pages": 300}
    run = RecordedLoad("continuous", **memory, scale_down_at=SCALE_DOWN_AT)
    rows = run.rows[: -2 * MANY]
    shrinks, grows = (
        [i for i in range(1, len(rows)) if sign * (rows[i] - rows[i - 1]) > 0] for sign in (-1, 1)
    )

    assert grows[-1] > shrinks[0]
    assert run.load.scheduler.num_preemptions < NUM_REQUESTS  # no request is preempted repeatedly
    alone = RecordedLoad("continuous", **memory, scale_down_at=0.1)
    assert max(alone.rows) < MANY  # a request that is larger runs alone


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
