"""The guarantees of each batcher, step by step, over a KV memory without bytes."""

from dataclasses import dataclass

import pytest

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.scheduler.batchers import (
    BATCHERS,
    DENSE_BATCHERS,
    parse_batcher,
    parse_dense_batcher,
)
from quire.scheduler.batchers.base import BatchView, is_prefilled, unit_of
from quire.scheduler.request import RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from support.scheduler_load import SchedulerLoad, Setting

ROWS = 3
ALL_BATCHERS = [*BATCHERS, "baton_pd:prefill=sync", "baton_pd:hold=host", "pd:ahead=5"]


def load_of(batcher, **setting):
    """A load with ample memory by default."""
    ample = {"pages": 400, "max_num_seqs": ROWS, "max_num_batched_tokens": 40, "host_pages": 400}
    return SchedulerLoad(Setting(batcher=batcher, **ample | setting))


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


def test_static_batch_completes_before_the_next_batch_starts():
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
    assert len(set(ends)) > 1  # outputs are returned as they end
    assert all(not decoding or len(tokens) == len(decoding) for tokens, decoding in plans)


def test_pd_prefills_prompts_of_similar_length_together():
    load = load_of("pd")
    requests = submit(load, *JOBS)
    entered = []
    for tokens, _ in steps(load):
        entered += [name for name in tokens if name not in entered]

    # the first and the nearest in length to 6; then the next waiting and the nearest to 20
    lengths = {r.request_id: len(r.prompt_token_ids) for r in requests}
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


def test_continuous_splits_the_prompt_that_orca_prefills_whole():
    plans = {}
    for batcher in ("continuous", "orca"):
        load = load_of(batcher, max_num_batched_tokens=24)
        requests = submit(load, (20, 3), (18, 3))
        plans[batcher] = [tokens.get(requests[1].request_id) for tokens, _ in steps(load)]

    assert plans["continuous"][0] == 4
    assert plans["orca"][:2] == [None, 18]


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


def test_sync_prefill_decodes_no_request_while_the_queue_is_filled():
    load = load_of("baton_pd:prefill=sync")
    submit(load, *JOBS * 2)
    plans = steps(load)

    assert all(len(tokens) == len(decoding) or not decoding for tokens, decoding in plans)
    assert sum(not decoding for _, decoding in plans) < len(plans) / 2


def test_prefill_tokens_of_a_step_with_a_full_batch_stay_within_budget():
    load = load_of("baton_pd:tokens=3")
    submit(load, *JOBS)
    for tokens, decoding in steps(load):
        if len(decoding) == ROWS:
            assert sum(tokens.values()) <= ROWS + 3


def test_prefilled_queue_holds_at_max_its_configured_rows():
    load = load_of("baton_pd:queue=2")
    submit(load, *JOBS * 3)
    most = 0
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
    order = []
    for _, decoding in steps(load):
        order += [name for name in decoding if name not in order]

    # 14 and its first token fit the 16 of the first; then 11; then 40 has been overtaken twice
    chosen = [r.request_id for r in (rest[3], rest[4], rest[0])]
    assert order[0] == first.request_id
    assert order[2:5] == chosen


# ---- urgency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batcher", ["continuous", "orca", *ALL_BATCHERS[4:7]])
@pytest.mark.parametrize("pages", [400, 14])
def test_urgent_request_is_prefilled_in_the_next_step(batcher, pages):
    load = load_of(batcher, urgent=-1, pages=pages)
    submit(load, *[(8, 12)] * 5)
    for _ in range(4):
        load.step()
    [urgent] = submit(load, (10, 3), priority=-1)
    plans = steps(load)

    own = [tokens.get(urgent.request_id, 0) for tokens, _ in plans]
    assert own[:3] == [10, 1, 1]


def test_request_displaced_from_the_batch_by_an_urgent_one_keeps_its_pages():
    load = load_of("baton_pd:queue=4", urgent=-1)
    submit(load, *[(8, 12)] * 4)
    for _ in range(4):
        load.step()
    submit(load, (10, 3), priority=-1)
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
    for _ in range(2):
        load.step()
    wide = [load.request(5, 2, -1) for _ in range(2)]
    load.submit_group(wide, atomic=False)
    for _ in range(3):
        load.step()

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
    for _ in range(3):
        load.step()
    submit(load, (15, 8))

    load.drain()  # fails if the load thrashes

    assert 0 < group[0].progress.num_preemptions < 12


def test_no_request_is_preempted_if_that_would_not_admit_the_urgent_one():
    load = load_of("continuous", urgent=-1)
    submit(load, *[(8, 12)] * ROWS, priority=-1)
    load.step()
    submit(load, (10, 3), priority=-1)
    submit(load, (10, 3), priority=0)
    load.drain()

    assert load.scheduler.num_preemptions == 0


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


def test_urgent_needs_more_batched_tokens_than_rows():
    with pytest.raises(
        ConfigError, match="expected max_num_batched_tokens > max_num_seqs, got 8 and 8"
    ):
        ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=8, urgent=0)


def test_num_rows_is_batch_size_plus_queue():
    rows = {text: parse_batcher(text).num_rows(4) for text in ALL_BATCHERS}

    assert rows["continuous"] == rows["static"] == rows["orca"] == rows["pd"] == 4
    assert rows["baton_pd"] == rows["baton_pd_best_fit"] == 8
    assert rows["pd:ahead=5"] == 5


# ---- dense rows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """A request as a batcher for dense rows sees it."""

    number: int
    num_to_read: int
    priority: int = 0


def dense_view(ready, *, columns, live=()):
    return BatchView(size=4, live=live, waiting=(), ready=ready, columns=columns, group_tokens=256)


def test_all_batchers_but_two_serve_pages_and_dense_rows():
    assert set(BATCHERS) ^ set(DENSE_BATCHERS) == {"continuous", "baton"}
    assert all(DENSE_BATCHERS[name] is BATCHERS[name] for name in set(BATCHERS) - {"continuous"})


def test_best_fit_takes_the_longest_that_adds_no_dense_columns():
    rule = parse_dense_batcher("baton_pd_best_fit")
    ready = [Waiting(0, 9), Waiting(1, 4), Waiting(2, 6), Waiting(3, 6)]

    assert rule.choose(dense_view(ready, columns=6)) == ready[2]
    assert rule.choose(dense_view(ready, columns=3)) == ready[1]


def test_patience_limits_how_often_a_request_is_overtaken_on_dense_rows():
    ready = [Waiting(0, 9), Waiting(1, 4), Waiting(3, 6)]
    chosen = {
        patience: parse_dense_batcher(f"baton_pd_best_fit:patience={patience}").choose(
            dense_view(ready, columns=6)
        )
        for patience in (2, 3)
    }

    assert chosen == {2: ready[0], 3: ready[2]}
