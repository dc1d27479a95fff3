"""What each batcher promises, step by step, over a memory without bytes."""

from dataclasses import dataclass

import pytest

from quire.errors import ConfigError, NeverFits, UnknownName, UnsoundCombination
from quire.scheduler.batchers.base import BatchView
from quire.scheduler.batchers.registry import (
    BATCHERS,
    DENSE_BATCHERS,
    parse_batcher,
    parse_dense_batcher,
)
from quire.scheduler.batchers.units import is_prefilled, unit_of
from quire.scheduler.request_parts import RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from unit.scheduler.scheduler_load import SchedulerLoad, Setting

ROWS = 3
EVERY = [*BATCHERS, "baton_pd:prefill=sync", "baton_pd:hold=host", "pd:ahead=5"]


def load_of(batcher, **setting):
    """Ample memory, unless it is said otherwise."""
    ample = {"pages": 400, "max_num_seqs": ROWS, "max_num_batched_tokens": 40, "host_pages": 400}
    return SchedulerLoad(Setting(batcher=batcher, **ample | setting))


def submit(load, *jobs, priority=0):
    """Requests of (prompt tokens, answer tokens)."""
    found = [load.request(prompt, answer, priority) for prompt, answer in jobs]
    assert all(map(load.submit, found))
    return found


def steps(load):
    """Plans until there is nothing to do: for each {id: tokens}, and ids of those that decoded."""
    plans, schedule = [], load.scheduler.schedule

    def watched():
        plan = schedule()
        ids = [request.request_id for request in plan.requests]
        plans.append((dict(zip(ids, plan.tokens, strict=True)), ids[: plan.num_decoding]))
        return plan

    load.scheduler.schedule = watched
    load.drain()
    return plans


JOBS = [(6, 3), (8, 9), (5, 5), (20, 4), (7, 2), (19, 6), (4, 4)]


def test_static_rows_run_to_completion_before_the_next_begin():
    load = load_of("static")
    requests = submit(load, *JOBS)
    plans = steps(load)
    spans = {}
    for number, (tokens, _) in enumerate(plans):
        for name in tokens:
            spans.setdefault(name, [number, number])[1] = number
    first, second = requests[:ROWS], requests[ROWS : 2 * ROWS]

    ends = [spans[r.request_id][1] for r in first]
    assert min(spans[r.request_id][0] for r in second) > max(ends)
    assert len(set(ends)) > 1  # answers are returned as they end
    assert all(not decoding or len(tokens) == len(decoding) for tokens, decoding in plans)


def test_pd_reads_prompts_of_similar_length_together():
    load = load_of("pd")
    requests = submit(load, *JOBS)
    entered = []
    for tokens, _ in steps(load):
        entered += [name for name in tokens if name not in entered]

    # the first and those nearest in length to 6; then the next that waits and those nearest to 20
    lengths = {r.request_id: len(r.prompt_token_ids) for r in requests}
    assert [lengths[name] for name in entered] == [6, 5, 7, 8, 4, 19, 20]


def test_orca_fills_a_row_at_once_and_cuts_no_prompt():
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


def test_continuous_cuts_the_prompt_that_orca_reads_whole():
    plans = {}
    for batcher in ("continuous", "orca"):
        load = load_of(batcher, max_num_batched_tokens=24)
        requests = submit(load, (20, 3), (18, 3))
        plans[batcher] = [tokens.get(requests[1].request_id) for tokens, _ in steps(load)]

    assert plans["continuous"][0] == 4
    assert plans["orca"][:2] == [None, 18]


@pytest.mark.parametrize("batcher", ["baton_pd", "baton_pd_best_fit", "baton_pd:tokens=3"])
def test_no_row_is_idle_while_the_queue_has_somebody(batcher):
    load = load_of(batcher)
    submit(load, *JOBS * 4)
    decodes, schedule, queued_steps = [], load.scheduler.schedule, 0

    def watched():
        nonlocal queued_steps
        queue = {unit_of(r) for r in load.scheduler.running if is_prefilled(unit_of(r))}
        plan = schedule()
        if len(queue) > plan.num_decoding:
            queued_steps += 1
            decodes.append(plan.num_decoding)
        return plan

    load.scheduler.schedule = watched
    load.drain()

    assert set(decodes) == {ROWS}
    assert queued_steps > 10


def test_sync_prefill_lets_nobody_decode_while_the_queue_is_filled():
    load = load_of("baton_pd:prefill=sync")
    submit(load, *JOBS * 2)
    plans = steps(load)

    assert all(len(tokens) == len(decoding) or not decoding for tokens, decoding in plans)
    assert sum(not decoding for _, decoding in plans) < len(plans) / 2


def test_a_step_reads_no_more_than_its_budget_beside_a_full_batch():
    load = load_of("baton_pd:tokens=3")
    submit(load, *JOBS)
    for tokens, decoding in steps(load):
        if len(decoding) == ROWS:
            assert sum(tokens.values()) <= ROWS + 3


def test_the_queue_holds_no_more_rows_than_it_may():
    load = load_of("baton_pd:queue=2")
    submit(load, *JOBS * 3)
    most = 0
    while load.scheduler.has_work:
        load.step()
        most = max(most, len(load.scheduler.running))

    assert most == ROWS + 2


def test_kv_of_the_queue_waits_on_the_host_and_is_there_before_a_row_ends():
    """Of a queue of three one is kept ready, the others leave; nobody is called a victim."""
    load = load_of("baton_pd:hold=host,lead=2")
    requests = submit(load, *[(6, 12)] * 9)
    on_host, late = 0, []
    while load.scheduler.has_work:
        load.step()
        away = [r for r in requests if r.memory.swapped is not None]
        on_host = max(on_host, len(away))
        running = load.scheduler.running
        ready = [r for r in running if r.num_uncomputed == 1 and r.output_token_ids]
        late.append(bool(away) and len(ready) < ROWS)
        load.check()

    assert on_host == 2
    assert not any(late[3:])
    assert load.scheduler.num_preemptions == 0
    assert not load.pool.used_bytes


def test_best_fit_takes_the_longest_that_fits_and_passes_nobody_for_ever():
    load = load_of("baton_pd_best_fit:patience=2,queue=9", max_num_seqs=2)
    first, _ = submit(load, (12, 30), (4, 3))
    load.step()
    rest = submit(load, (40, 2), (5, 2), (9, 2), (14, 2), (11, 2), (3, 2))
    order = []
    for _, decoding in steps(load):
        order += [name for name in decoding if name not in order]

    # 14 and its first token fit the 16 of the first; then 11; then the 40 has been passed twice
    chosen = [r.request_id for r in (rest[3], rest[4], rest[0])]
    assert order[0] == first.request_id
    assert order[2:5] == chosen


@pytest.mark.parametrize("batcher", EVERY)
def test_a_cancelled_query_gives_its_pages_back_wherever_it_is(batcher):
    load = load_of(batcher)
    submit(load, *[(6, 9)] * 8)
    for pick in (7, 3, 4, 0, 0):
        load.step()
        load.cancel(pick)
        load.check()

    load.drain()


def test_a_cancelled_query_of_the_prefilled_queue_gives_its_pages_back():
    load = load_of("baton_pd")
    requests = submit(load, *[(6, 9)] * 6)
    load.step()
    load.step()
    queued = requests[ROWS]
    assert is_prefilled(queued)
    used_bytes = load.memory.total_bytes - load.memory.free_bytes
    load.scheduler.finish(load.requests.pop(queued.request_id), "cancelled")

    assert queued.progress.state is RequestState.FINISHED
    assert load.memory.total_bytes - load.memory.free_bytes < used_bytes
    load.drain()


# ---- urgency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batcher", ["continuous", "orca", *EVERY[4:7]])
@pytest.mark.parametrize("pages", [400, 14])
def test_an_urgent_request_is_read_in_the_next_step(batcher, pages):
    load = load_of(batcher, urgent=-1, pages=pages)
    submit(load, *[(8, 12)] * 5)
    for _ in range(4):
        load.step()
    [urgent] = submit(load, (10, 3), priority=-1)
    plans = steps(load)

    own = [tokens.get(urgent.request_id, 0) for tokens, _ in plans]
    assert own[:3] == [10, 1, 1]


def test_who_makes_way_for_an_urgent_request_in_the_batch_keeps_its_pages():
    load = load_of("baton_pd:queue=4", urgent=-1)
    submit(load, *[(8, 12)] * 4)
    for _ in range(4):
        load.step()
    submit(load, (10, 3), priority=-1)
    load.drain()

    assert load.scheduler.num_preemptions == 0


def test_nobody_gives_way_where_that_would_not_be_enough():
    load = load_of("continuous", urgent=-1)
    submit(load, *[(8, 12)] * ROWS, priority=-1)
    load.step()
    submit(load, (10, 3), priority=-1)
    submit(load, (10, 3), priority=0)
    load.drain()

    assert load.scheduler.num_preemptions == 0


# ---- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("batn_pd", UnknownName, "did you mean baton_pd"),
        ("baton", UnsoundCombination, r"use baton_pd here, or use quire\.hf\.DynamicBatch"),
        ("baton_pd:lines=3", UnknownName, "option of batcher 'baton_pd' 'lines'"),
        ("baton_pd:queue", ConfigError, "expected option=value such as queue=8"),
        ("baton_pd:queue=2,queue=3", ConfigError, "is given twice"),
        ("baton_pd:queue=-1", ConfigError, "expected queue >= 0, got -1"),
        ("baton_pd:queue=some", ConfigError, "option queue needs a whole number"),
        ("baton_pd:hold=disk", UnknownName, "location of prefilled KV"),
        ("baton_pd_best_fit:prefill=never", UnknownName, "prefill mode"),
        ("pd:window=0", ConfigError, "expected window >= 1"),
        ("static:queue=1", UnknownName, "of batcher 'static' 'queue': there is none; leave it out"),
        ("static:", ConfigError, "expected option=value"),
    ],
)
def test_what_is_no_batcher_is_refused_before_anything_starts(text, error, says):
    with pytest.raises(error, match=says):
        ScheduleConfig(batcher=text)


def test_urgency_needs_room_beside_a_full_batch():
    with pytest.raises(
        ConfigError, match="expected max_num_batched_tokens > max_num_seqs, got 8 and 8"
    ):
        ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=8, urgent=0)


def test_rows_of_memory_are_those_of_batch_and_queue():
    rows = {text: parse_batcher(text).num_rows(4) for text in EVERY}

    assert rows["continuous"] == rows["static"] == rows["orca"] == rows["pd"] == 4
    assert rows["baton_pd"] == rows["baton_pd_best_fit"] == 8
    assert rows["pd:ahead=5"] == 5


@pytest.mark.parametrize("options", ["hold=host", "hold=device", "queue=3,hold=host,lead=2"])
def test_both_queues_of_prefilled_queries_hold_them_alike(options):
    first, best = (parse_batcher(f"{name}:{options}") for name in ("baton_pd", "baton_pd_best_fit"))

    assert first.holds_on_host == best.holds_on_host == ("host" in options)
    assert first.queue_options(4) == best.queue_options(4)
    assert "holds_on_host" not in vars(type(best))  # one place


@pytest.mark.parametrize("batcher", EVERY)
def test_a_query_that_can_never_fit_is_refused_under_every_batcher(batcher):
    load = load_of(batcher, pages=8)

    with pytest.raises(NeverFits, match="raise --kv-memory"):
        load.scheduler.submit(load.request(400, 3))
    submit(load, (5, 3))
    load.drain()


# ---- dense rows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """A query as a rule for dense rows sees it."""

    number: int
    num_to_read: int
    priority: int = 0


def dense_view(ready, *, columns, live=()):
    return BatchView(size=4, live=live, waiting=(), ready=ready, columns=columns, group_tokens=256)


def test_every_rule_but_two_serves_pages_and_dense_rows():
    assert set(BATCHERS) ^ set(DENSE_BATCHERS) == {"continuous", "baton"}
    assert all(DENSE_BATCHERS[name] is BATCHERS[name] for name in set(BATCHERS) - {"continuous"})


def test_best_fit_takes_the_longest_that_widens_no_dense_row():
    rule = parse_dense_batcher("baton_pd_best_fit")
    ready = [Waiting(0, 9), Waiting(1, 4), Waiting(2, 6), Waiting(3, 6)]

    assert rule.choose(dense_view(ready, columns=6)) == ready[2]
    assert rule.choose(dense_view(ready, columns=3)) == ready[1]


def test_patience_bounds_how_many_overtake_a_query_on_dense_rows():
    ready = [Waiting(0, 9), Waiting(1, 4), Waiting(3, 6)]
    chosen = {
        patience: parse_dense_batcher(f"baton_pd_best_fit:patience={patience}").choose(
            dense_view(ready, columns=6)
        )
        for patience in (2, 3)
    }

    assert chosen == {2: ready[0], 3: ready[2]}
