"""Admission rules: what each promises, and what comes of it under load."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.rules import RULES, Estimated, highest_point, make_admission
from quire.scheduler.schedule_config import ScheduleConfig
from support.requests import make_request
from unit.scheduler.scheduler_load import make_layout, make_scheduler


def memory_of(pages, *, page_tokens=4, max_rows=32):
    layout = make_layout(page_tokens, None, evicting=False)
    return KVMemory(layout, layout.smallest_sequence_bytes * pages, max_rows)


def request_of(prompt, answer, *, generated=0, arrival=0):
    request = make_request(
        request_id=f"r{arrival}",
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(max_tokens=answer),
        arrival=arrival,
    )
    request.output_token_ids.extend([2] * generated)
    return request


def running(memory, prompt, answer, *, generated):
    """A request that decodes: all it knows but its last token is in the memory."""
    request = request_of(prompt, answer, generated=generated)
    request.memory.row = memory.start()
    request.progress.num_computed = prompt + generated - 1
    tokens = np.array([request.progress.num_computed], dtype=np.int32)
    memory.grow(np.array([request.memory.row]), tokens)
    return request


def rule_over(name, memory):
    return make_admission(name, Peaks(memory, chunk_tokens=2048))


def test_each_rule_promises_more_the_more_it_foresees():
    """Two layers, 4 tokens a page. Known: 8 tokens, 4 pages. All: 8 + 40 - 1 tokens, 24 pages.

    The one that runs has 11 of 8 + 40 - 1 tokens: 6 of 24 pages.
    """
    memory = memory_of(60)
    other = running(memory, 8, 40, generated=4)
    new_request = request_of(8, 40, arrival=1)
    promised = {
        name: int(rule_over(name, memory).promised(new_request, [other], 0).sum()) for name in RULES
    }

    assert promised == {"optimistic": 4, "reserved": 24 + 18, "estimated": 24 + 18 - 2}


def test_shared_pages_are_not_promised_again():
    memory = memory_of(60)
    rule = rule_over("optimistic", memory)

    assert rule.promised(request_of(21, 9), [], 16).tolist() == [2 * (6 - 4)]


def test_the_estimate_starts_as_a_reservation_and_follows_what_answers_use():
    memory = memory_of(60)
    rule = rule_over("estimated", memory)
    assert isinstance(rule, Estimated)
    new_request = request_of(8, 40)
    assert rule.expected_tokens(new_request) == new_request.final_tokens == 47

    for _ in range(100):
        rule.learn(request_of(8, 40, generated=10))

    assert rule.ratio == pytest.approx(0.25, abs=0.01)
    assert (
        rule.expected_tokens(new_request) == 8 + 12 - 1
    )  # 1.2 * 0.25 * 40, the last not processed
    late = request_of(8, 40, generated=30)
    assert rule.expected_tokens(late) == 8 + 30 + 1  # past its time: one more at least
    last = request_of(8, 40, generated=39)
    assert rule.expected_tokens(last) == last.final_tokens


ENDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8
)


def test_alone_a_sequence_is_promised_what_it_owes_and_no_page_for_rounding():
    """14 pages in 25 steps are 0.56 a step, and 25 times that is more than 14 in floats."""
    steps, owed = (x.ravel() for x in np.meshgrid(np.arange(1, 100), np.arange(100)))

    found = [
        highest_point(np.array([n]), *[np.array([[pages]])] * 2)
        for n, pages in zip(steps, owed, strict=True)
    ]

    assert np.array_equal(np.concatenate(found), owed)


@given(ENDS)
@example([(0, 0, 2), (1, 1, 0), (1, 1, 0)])
def test_the_highest_point_is_that_of_a_run_step_by_step(ends):
    """Everybody grows evenly to what it owes; at its end it has given back all it holds.

    Who is to end at once still holds its pages in the step that ends it, in which others grow.
    """
    steps, owed, held = (np.array(column) for column in zip(*ends, strict=True))
    best = 0.0
    for now in range(max(1, int(steps.max())) + 1):
        level = 0.0
        for left, still, has in zip(np.maximum(steps, 1), owed, held, strict=True):
            if left < now:
                level -= has
            else:
                level += still * (now / left)
        best = max(best, level)
    found = highest_point(steps, owed[:, None], (owed + held)[:, None])

    assert best - 1e-6 <= found[0] <= np.ceil(best - 1e-6) + owed.max(initial=0)


def test_an_unknown_rule_is_refused_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean reserved"):
        rule_over("reservd", memory_of(8))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.9, 0.8), (0.5, 1.5), (float("nan"), 1.0)])
def test_watermarks_out_of_order_are_refused(low, high):
    with pytest.raises(ConfigError, match="low_watermark"):
        ScheduleConfig(low_watermark=low, high_watermark=high)


def run_load(admission, *, seed=7, pages=80, stop_share=1.0, **schedule):
    """Run random requests to their end; return preemptions and the most that ran at once."""
    rng = random.Random(seed)
    memory = memory_of(pages)
    config = ScheduleConfig(admission=admission, max_num_batched_tokens=64, **schedule)
    scheduler = make_scheduler(memory, config)
    for arrival in range(60):
        scheduler.submit(request_of(rng.randint(1, 20), rng.randint(8, 40), arrival=arrival))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.requests
        scheduler.commit(plan)
        most = max(most, len(scheduler.running))
        for request in plan.requests:
            if request.num_uncomputed == 0:
                request.output_token_ids.append(2)
                if len(request.output_token_ids) >= stop_share * request.params.max_tokens:
                    scheduler.finish(request)
    memory.check()
    return scheduler.num_preemptions, most


def test_reserved_admission_never_preempts_and_optimistic_runs_more():
    preempted, most = zip(*(run_load(name) for name in ("reserved", "optimistic")), strict=True)

    assert preempted[0] == 0
    assert preempted[1] > 0
    assert most[1] > most[0]


def test_estimated_admission_runs_more_than_reserved_where_answers_end_early():
    reserved, estimated, optimistic = (
        run_load(name, stop_share=0.3) for name in ("reserved", "estimated", "optimistic")
    )

    assert reserved[0] == 0
    assert reserved[1] < estimated[1] <= optimistic[1]
    assert estimated[0] <= optimistic[0]


def test_the_low_watermark_leaves_a_part_free_when_somebody_enters():
    free, half = (
        run_load("optimistic", low_watermark=1.0),
        run_load("optimistic", low_watermark=0.5, high_watermark=1.0),
    )

    assert half[1] < free[1]
    assert half[0] < free[0]


def test_above_the_high_watermark_somebody_gives_way_before_memory_is_full():
    memory = memory_of(80)
    config = ScheduleConfig(low_watermark=0.5, high_watermark=0.6, max_num_batched_tokens=64)
    scheduler = make_scheduler(memory, config)
    for arrival in range(20):
        scheduler.submit(request_of(8, 40, arrival=arrival))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan)
        for request in plan.requests:
            if request.num_uncomputed == 0:
                request.output_token_ids.append(2)
                if len(request.output_token_ids) >= request.params.max_tokens:
                    scheduler.finish(request)

    assert scheduler.num_preemptions > 0
    a_step = 2 * len(memory.lengths) * memory.layout.smallest_sequence_bytes
    assert memory.arena_peak_bytes <= 0.6 * memory.total_bytes + a_step
