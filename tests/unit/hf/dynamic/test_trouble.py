"""DynamicBatch where something goes wrong: failed forwards, small memories, rows used twice."""

import random

import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits, RequestError
from quire.hf import DynamicBatch
from quire.hf.dynamic.query import Query, QueryState
from support.dynamic import RULES, build, check_empty, run, run_at_random
from support.engines import make_prompts

PROMPTS = make_prompts(8, 30, seed=5)


def alone(prompt: list[int], new_tokens: int) -> list[int]:
    return (
        run(DynamicBatch(build("llama"), batch_size=1), [prompt], new_tokens).handles[0].token_ids
    )


@pytest.mark.parametrize("rule", ["pd", "static"])
def test_a_row_that_ends_before_its_batch_begins_leaves_nothing_behind(rule):
    """Its row is free while the others' prompts, of another length, are still to be read."""
    prompts, new_tokens = [list(range(40, 80)), [9, 8, 7], [5] * 42], [1, 9, 9]

    seen = run(DynamicBatch(build("llama"), batch_size=3, batcher=rule), prompts, new_tokens)

    for handle, prompt, count in zip(seen.handles, prompts, new_tokens, strict=True):
        assert handle.token_ids == alone(prompt, count)


# ---- a forward that fails --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "how", "error"),
    [
        *((rule, {}, RuntimeError) for rule in RULES),
        ("baton_pd", {"prefill": "async", "prefill_tokens": 7}, KeyboardInterrupt),
    ],
)
def test_after_a_step_that_failed_others_give_the_same_answers(rule, how, error):
    model, rng, calls = build("llama"), random.Random(len(rule)), []
    expected = [handle.token_ids for handle in run(DynamicBatch(model), PROMPTS).handles]
    batch = DynamicBatch(model, batch_size=3, batcher=rule, **how)
    handles = [batch.submit(prompt, 8) for prompt in PROMPTS]

    def failing(*_args, **_inputs):  # when one of two layers has been written
        calls.append(rng.random() < 0.2)
        if calls[-1]:
            raise error("of the device")

    hook = model.model.layers[1].register_forward_pre_hook(failing)
    while batch.has_work:
        try:
            batch.step()
        except error:
            assert batch.num_running == 0
            assert batch.num_queued == sum(not handle.finished for handle in handles)
    hook.remove()

    assert calls.count(True) >= 3
    assert [handle.token_ids for handle in handles] == expected
    check_empty(batch)


# ---- who is urgent ---------------------------------------------------------------------------


def test_an_urgent_prompt_is_read_at_once_beside_one_that_is_as_urgent():
    """It takes the row of the third, which must not stand idle while it is read bit by bit."""
    batch = DynamicBatch(build("llama"), batch_size=2, prefill="async", prefill_tokens=2)
    batch.submit(PROMPTS[0], 20, priority=0)
    other = batch.submit(PROMPTS[1], 20, priority=1)
    while batch.num_running < 2:
        batch.step()
    urgent = batch.submit([7] * 25, 20, priority=0)

    batch.step()

    assert other.preemptions == 1
    assert urgent.state is QueryState.RUNNING
    assert batch.last.live == 2


def test_a_step_looks_at_the_head_of_the_line(monkeypatch):
    batch = DynamicBatch(build("llama"), batch_size=2)
    for _ in range(300):
        batch.submit([3], 3)
    batch.step()
    seen = []
    for name in ("rank", "certain_tokens"):
        found = vars(Query)[name].fget

        def counted(query, found=found):
            seen.append(query.number)
            return found(query)

        monkeypatch.setattr(Query, name, property(counted))

    for _ in range(4):  # rows fall free and are filled meanwhile
        batch.step()

    assert max(seen) >= 2
    assert len(seen) < 100


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "prefill", "seed"),
    [("baton", "sync", 1), ("baton_pd", "async", 0), ("baton_pd_best_fit", "sync", 0)],
)
def test_a_threshold_holds_while_slabs_grow_and_prompts_are_taken_apart(rule, prefill, seed):
    model = build("llama")
    threshold = DynamicBatch(model)._model.shape.token_bytes * 130
    prompts = [prompt * 2 for prompt in make_prompts(8, 20, seed)]
    batch = DynamicBatch(
        model, batch_size=4, batcher=rule, prefill=prefill, scale_at=threshold, swap_space=0
    )

    run_at_random(batch, prompts, seed)

    assert batch.device_meter.peak_bytes <= threshold
    check_empty(batch)


@pytest.mark.parametrize("rule", ["static", "pd"])
def test_batches_that_run_to_their_end_stay_within_the_capacity(rule):
    """A long prompt and a long answer fit by themselves, not in the columns of one batch."""
    batch = DynamicBatch(build("llama"), batch_size=2, batcher=rule, capacity_tokens=40)
    prompts, new_tokens = [[5] * 36, [6] * 4, [7] * 5], [4, 36, 30]

    handles = [batch.submit(*requested) for requested in zip(prompts, new_tokens, strict=True)]
    widest = 0
    while batch.has_work:
        batch.step()
        widest = max(widest, batch.last.columns)

    assert widest <= 40
    assert [len(handle.token_ids) for handle in handles] == new_tokens


# ---- from batch to batch ---------------------------------------------------------------------


def test_a_query_moves_to_a_batch_without_host_memory_and_is_read_again():
    one, other = DynamicBatch(build("llama")), DynamicBatch(build("llama"), swap_space=0)
    handle = one.submit(PROMPTS[0], 10)
    for _ in range(4):
        one.step()

    other.adopt(one.extract(handle))
    other.run()

    assert handle.token_ids == alone(PROMPTS[0], 10)
    check_empty(one)
    check_empty(other)


def test_only_what_was_extracted_and_fits_is_adopted():
    one, small = DynamicBatch(build("llama")), DynamicBatch(build("llama"), capacity_tokens=20)
    handle = one.submit([3] * 15, 10)
    one.step()
    with pytest.raises(RequestError, match="that `extract` has returned, got one that is running"):
        small.adopt(handle)
    with pytest.raises(NeverFits, match="need 24 columns, but capacity_tokens is 20"):
        small.adopt(one.extract(handle))
    with pytest.raises(RequestError, match="waiting or running query, got one that is extracted"):
        one.extract(handle)

    one.cancel(handle)

    assert handle.finish_reason == "cancelled"
    check_empty(one)


# ---- what is asked ---------------------------------------------------------------------------


def test_the_number_of_tokens_may_be_among_the_sampling_options():
    batch = DynamicBatch(build("llama"))
    requested = SamplingParams(max_tokens=3)
    handles = [batch.submit([3], sampling=requested), batch.submit([3], 5, sampling=requested)]
    batch.run()

    assert [len(handle.token_ids) for handle in handles] == [3, 5]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampling": SamplingParams(logprobs=1)}, "expected no logprobs"),
        (
            {"sampling": SamplingParams(use_beam_search=True, beam_width=1)},
            "one completion per query",
        ),
        ({"priority": True}, "priority to be a whole number, got True"),
        ({"deadline_s": float("nan")}, "a time on the batch's clock, got NaN"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, says):
    with pytest.raises(RequestError, match=says):
        DynamicBatch(build("llama")).submit([3], **options)
