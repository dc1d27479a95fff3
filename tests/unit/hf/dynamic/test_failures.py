"""`DynamicBatch` under failures: failed forwards, small memories, reused rows."""

import random

import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits, RequestError
from quire.hf import DynamicBatch
from quire.hf.dynamic.query import Query
from support.dynamic import RULES, build, check_empty, run, run_at_random
from support.engines import make_prompts

PROMPTS = make_prompts(8, 30, seed=5)


def alone(prompt: list[int], new_tokens: int) -> list[int]:
    return (
        run(DynamicBatch(build("llama"), batch_size=1), [prompt], new_tokens).handles[0].token_ids
    )


@pytest.mark.parametrize("rule", ["pd", "static"])
def test_row_that_finishes_before_its_batch_starts_is_freed(rule):
    """Its row is free while the prompts of the other rows still have to be prefilled."""
    prompts, new_tokens = [list(range(40, 80)), [9, 8, 7], [5] * 42], [1, 9, 9]

    result = run(DynamicBatch(build("llama"), batch_size=3, batcher=rule), prompts, new_tokens)

    for handle, prompt, count in zip(result.handles, prompts, new_tokens, strict=True):
        assert handle.token_ids == alone(prompt, count)


# ---- a forward that fails --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "error"),
    [
        *((rule, {}, RuntimeError) for rule in RULES),
        ("baton_pd", {}, KeyboardInterrupt),
    ],
)
def test_completions_are_unchanged_after_a_failed_step(rule, options, error):
    model, rng, calls = build("llama"), random.Random(len(rule)), []
    expected = [handle.token_ids for handle in run(DynamicBatch(model), PROMPTS).handles]
    batch = DynamicBatch(model, batch_size=3, batcher=rule, **options)
    handles = [batch.submit(prompt, 8) for prompt in PROMPTS]

    def failing(*_args, **_inputs):  # after one of two layers has been written
        calls.append(rng.random() < 0.2)
        if calls[-1]:
            raise error("device error")

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


# ---- priorities ------------------------------------------------------------------------------


def test_step_ranks_only_the_head_of_the_queue(monkeypatch):
    batch = DynamicBatch(build("llama"), batch_size=2)
    for _ in range(300):
        batch.submit([3], 3)
    batch.step()
    result = []
    for name in ("rank", "certain_tokens"):
        found = vars(Query)[name].fget

        def counted(query, found=found):
            result.append(query.number)
            return found(query)

        monkeypatch.setattr(Query, name, property(counted))

    for _ in range(4):  # rows become free and are filled
        batch.step()

    assert max(result) >= 2
    assert len(result) < 100


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "seed"), [("baton", 1), ("baton_pd", 0), ("baton_pd_best_fit", 0)]
)
def test_device_memory_stays_below_the_threshold_while_slabs_grow(rule, seed):
    model = build("llama")
    threshold = DynamicBatch(model)._model.shape.token_bytes * 130
    prompts = [prompt * 2 for prompt in make_prompts(8, 20, seed)]
    batch = DynamicBatch(model, batch_size=4, batcher=rule, scale_at=threshold, swap_space=0)

    run_at_random(batch, prompts, seed)

    assert batch.device_meter.peak_bytes <= threshold
    check_empty(batch)


@pytest.mark.parametrize("rule", ["static", "pd"])
def test_static_batches_stay_within_capacity_tokens(rule):
    """A long prompt and a long completion each fit alone, but not in the columns of one batch."""
    batch = DynamicBatch(build("llama"), batch_size=2, batcher=rule, capacity_tokens=40)
    prompts, new_tokens = [[5] * 36, [6] * 4, [7] * 5], [4, 36, 30]

    handles = [batch.submit(*arguments) for arguments in zip(prompts, new_tokens, strict=True)]
    widest = 0
    while batch.has_work:
        batch.step()
        widest = max(widest, batch.last.columns)

    assert widest <= 40
    assert [len(handle.token_ids) for handle in handles] == new_tokens


# ---- from batch to batch ---------------------------------------------------------------------


def test_query_moved_to_a_batch_without_swap_space_is_recomputed():
    first, second = DynamicBatch(build("llama")), DynamicBatch(build("llama"), swap_space=0)
    handle = first.submit(PROMPTS[0], 10)
    for _ in range(4):
        first.step()

    second.adopt(first.extract(handle))
    second.run()

    assert handle.token_ids == alone(PROMPTS[0], 10)
    check_empty(first)
    check_empty(second)


def test_adopt_requires_an_extracted_query_that_fits():
    first, small = DynamicBatch(build("llama")), DynamicBatch(build("llama"), capacity_tokens=20)
    handle = first.submit([3] * 15, 10)
    first.step()
    with pytest.raises(RequestError, match="that `extract` has returned, got one that is running"):
        small.adopt(handle)
    with pytest.raises(NeverFits, match="need 24 columns, but capacity_tokens is 20"):
        small.adopt(first.extract(handle))
    with pytest.raises(RequestError, match="waiting or running query, got one that is extracted"):
        first.extract(handle)

    first.cancel(handle)

    assert handle.finish_reason == "cancelled"
    check_empty(first)


# ---- sampling options ------------------------------------------------------------------------


def test_max_tokens_can_be_set_by_sampling_params():
    batch = DynamicBatch(build("llama"))
    params = SamplingParams(max_tokens=3)
    handles = [batch.submit([3], sampling=params), batch.submit([3], 5, sampling=params)]
    batch.run()

    assert [len(handle.token_ids) for handle in handles] == [3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingParams(stop=("x",))}, "create the batch with tokenizer="),
        ({"sampling": SamplingParams(use_beam_search=True, beam_width=1)}, "use quire.LLM"),
        ({"priority": True}, "priority to be a whole number, got True"),
        ({"deadline_s": float("nan")}, "a time on the batch's clock, got NaN"),
    ],
)
def test_unsupported_request_options_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        DynamicBatch(build("llama")).submit([3], **options)
