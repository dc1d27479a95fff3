import random
from dataclasses import replace

import pytest
import torch

from quire.config.sampling_params import SamplingParams
from quire.errors import (
    ConfigError,
    NeverFits,
    RequestError,
    SlabFull,
    UnknownName,
    UnsupportedModel,
)
from quire.hf import DynamicBatch
from quire.hf.dynamic.query import Query, QueryState
from quire.hf.dynamic.slab_model import MaskRule, check_implementation, visible
from quire.scheduler.batchers import DENSE_BATCHERS
from support import zoo
from support.dynamic import CHANGING, RULES, build, check_empty, run, run_at_random
from support.engines import make_prompts

PROMPTS = make_prompts(6, 30, seed=2)
EIGHT = make_prompts(8, 30, seed=5)


def test_all_registered_batchers_are_tested():
    assert set(DENSE_BATCHERS) == set(RULES)


def alone(prompt: list[int], new_tokens: int, **options: object) -> list[int]:
    batch = DynamicBatch(build("llama"), batch_size=1)
    handle = batch.submit(prompt, new_tokens, **options)
    batch.run()
    return handle.token_ids


@pytest.mark.parametrize("rule", CHANGING)
def test_seeds_penalties_and_stop_ids_survive_preemption(rule):
    penalty = SamplingParams(temperature=0.0, repetition_penalty=1.8)
    params = [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.8, top_k=5, seed=3),
        penalty,
        SamplingParams(temperature=0.0, frequency_penalty=1.5),
    ]
    expected = [alone(prompt, 12, sampling=p) for prompt, p in zip(PROMPTS, params, strict=False)]
    stop = expected[2][6]
    params.append(replace(penalty, stop_token_ids=(stop,)))
    batch = DynamicBatch(build("llama"), batch_size=2, batcher=rule)
    prompts = zip([*PROMPTS[:4], PROMPTS[2]], params, strict=True)
    handles = [batch.submit(prompt, 12, sampling=p) for prompt, p in prompts]

    while batch.has_work:
        batch.step()
        running = [handle for handle in handles if handle.state is QueryState.RUNNING]
        if running:
            batch.preempt(running[0])

    assert [handle.token_ids for handle in handles[:4]] == expected
    assert handles[4].token_ids == expected[2][: expected[2].index(stop) + 1]
    assert handles[4].finish_reason == "stop"
    assert sum(handle.preemptions > 0 for handle in handles) >= 3


@pytest.mark.parametrize("rule", CHANGING)
def test_urgent_query_gets_its_first_token_in_one_step(rule):
    batch = DynamicBatch(build("llama"), batch_size=2, batcher=rule)
    others = [batch.submit(prompt, 20, priority=1) for prompt in PROMPTS[:5]]
    for _ in range(6):
        batch.step()
    urgent = batch.submit(PROMPTS[5], 20, priority=0)

    batch.step()

    assert urgent.state is QueryState.RUNNING
    assert len(urgent.token_ids) >= 1
    batch.run()
    assert [other.token_ids for other in others] == [alone(p, 20) for p in PROMPTS[:5]]
    assert sum(other.preemptions for other in others) >= 1
    check_empty(batch)


def test_equal_priority_does_not_preempt_and_deadlines_order_the_queue():
    batch = DynamicBatch(build("llama"), batch_size=1)
    first = batch.submit(PROMPTS[0], 6)
    batch.step()
    late = batch.submit(PROMPTS[1], 6)
    soon = batch.submit(PROMPTS[2], 6, deadline_s=1e9)
    batch.run()
    assert first.preemptions == 0
    assert first.times_s[-1] < soon.times_s[0] < late.times_s[0]


def test_static_batch_runs_to_completion_and_reports_queries_early():
    batch = DynamicBatch(build("llama"), batch_size=2, batcher="static")
    short, long, after = (batch.submit(p, n) for p, n in zip(PROMPTS, (3, 9, 3), strict=False))
    live = []
    while batch.has_work:
        batch.step()
        live.append((batch.last.rows, batch.last.live))

    assert live == [(2, 2)] * 3 + [(2, 1)] * 6 + [(1, 1)] * 3
    assert short.finished_s < long.finished_s < after.finished_s
    handle = batch.submit(PROMPTS[0], 4)
    batch.step()
    with pytest.raises(RequestError, match=r"a batcher that changes its rows"):
        batch.preempt(handle)


@pytest.mark.parametrize("rule", CHANGING)
def test_rows_are_not_idle_and_preempted_ones_resume_with_equal_completions(rule):
    batch = DynamicBatch(build("llama"), batch_size=2, batcher=rule)
    for i, prompt in enumerate(PROMPTS):
        batch.submit(prompt, 3 + i)
    while batch.has_work:
        batch.step()
        assert not batch.last.queued or batch.last.live == batch.last.rows == 2

    prompts, new_tokens = [prompt[:8] for prompt in PROMPTS * 2], [60] * 4 + [6] * 8
    unlimited = DynamicBatch(build("llama"), batch_size=4, batcher=rule)
    expected = [handle.token_ids for handle in run(unlimited, prompts, new_tokens).handles]
    threshold = int(unlimited.device_meter.peak_bytes * 0.6)
    batch = DynamicBatch(build("llama"), batch_size=4, batcher=rule, scale_at=threshold)

    result = run(batch, prompts, new_tokens)

    assert [handle.token_ids for handle in result.handles] == expected
    assert batch.device_meter.peak_bytes <= threshold
    fewer = [a > b for a, b in zip(result.live, result.live[1:], strict=False)]
    more = [a < b for a, b in zip(result.live, result.live[1:], strict=False)]
    assert True in fewer
    assert True in more[fewer.index(True) :]
    assert sum(handle.preemptions for handle in result.handles) >= 1
    check_empty(batch)


@pytest.mark.parametrize("swap_space", [0, 3_000])
def test_full_swap_space_keeps_completions_equal(swap_space):
    prompts = [prompt[:8] for prompt in PROMPTS]
    unlimited = DynamicBatch(build("llama"), batch_size=4)
    expected = [handle.token_ids for handle in run(unlimited, prompts, 60).handles]
    threshold = int(unlimited.device_meter.peak_bytes * 0.6)
    batch = DynamicBatch(build("llama"), batch_size=4, scale_at=threshold, swap_space=swap_space)

    result = run(batch, prompts, 60)

    assert [handle.token_ids for handle in result.handles] == expected
    assert batch.host_meter.peak_bytes <= swap_space
    check_empty(batch)


def test_baton_reports_a_full_slab():
    batch = DynamicBatch(build("llama"), batch_size=2, batcher="baton", capacity_tokens=48)
    handles = [batch.submit([3] * 20, 10 + 6 * i) for i in range(4)]

    with pytest.raises(
        SlabFull, match=r"at most capacity_tokens=48 columns, got \d+: raise capacity_tokens"
    ):
        batch.run()

    before = [list(handle.token_ids) for handle in handles]
    assert any(before)
    for handle in handles:
        batch.cancel(handle)
    assert [handle.token_ids for handle in handles] == before
    batch.step()
    check_empty(batch)


def test_cancel_works_in_every_query_state():
    batch = DynamicBatch(build("llama"), batch_size=2, batcher="baton_pd_best_fit")
    handles = [batch.submit([7] * 30, 12) for _ in range(9)]
    states = set()
    while batch.has_work:
        batch.step()
        for state in (QueryState.WAITING, QueryState.READY):
            found = [handle for handle in handles if handle.state is state]
            if found and state not in states:
                states.add(state)
                batch.cancel(found[-1])
    running = batch.submit([7] * 30, 12)
    batch.step()
    batch.cancel(running)
    batch.cancel(running)
    batch.step()

    assert states == {QueryState.WAITING, QueryState.READY}
    assert [handle.finish_reason for handle in handles].count("cancelled") == 2
    assert running.finish_reason == "cancelled"
    expected = alone([7] * 30, 12)
    assert all(h.token_ids == expected for h in handles if h.finish_reason == "length")
    check_empty(batch)


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "options", "error", "message"),
    [
        ([], 4, {}, RequestError, "a prompt of one token or more"),
        ([3, 128], 4, {}, RequestError, "token ids from 0 to 127, got 128"),
        ([3], 0, {}, RequestError, "max_new_tokens >= 1, got 0"),
        ([3] * 500, 13, {}, RequestError, "exceed the model's context of 512 tokens"),
        ([3] * 30, 4, {"capacity_tokens": 32}, NeverFits, "33 columns, but capacity_tokens is 32"),
        ([3] * 30, 4, {"scale_at": 4_000}, NeverFits, "B of KV, but scale_at is 4,000 B; raise it"),
    ],
)
def test_query_that_can_never_run_is_refused(prompt, new_tokens, options, error, message):
    batch = DynamicBatch(build("llama"), **options)

    with pytest.raises(error, match=message):
        batch.submit(prompt, new_tokens)

    assert not batch.has_work
    assert batch.device_meter.used_bytes == 0
    if options.get("capacity_tokens") == 32:
        fitting = DynamicBatch(build("llama"), capacity_tokens=33)
        handle = fitting.submit(prompt, new_tokens)
        fitting.run()
        assert handle.token_ids == alone(prompt, new_tokens)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batcher": "batton"}, UnknownName, "did you mean baton"),
        (
            {"batcher": "continuous"},
            ConfigError,
            "needs paged KV .*: use batcher='baton_pd' h",
        ),
        ({"batcher": "baton_pd:queue=8"}, ConfigError, "option 'queue' is only for paged KV"),
        ({"batcher": "pd:ahead"}, ConfigError, "expected option=value such as queue=8"),
        ({"batcher": "baton_pd_best_fit:patience=-1"}, ConfigError, "patience >= 0, got -1"),
        ({"batch_size": 0}, ConfigError, "batch_size >= 1, got 0"),
        ({"capacity_tokens": 1}, ConfigError, "capacity_tokens >= 2, got 1"),
        ({"scale_at": "much"}, ConfigError, "much"),
    ],
)
def test_invalid_options_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        DynamicBatch(build("llama"), **options)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("phi3_longrope", r"longrope rotary frequencies"),
        ("llama4", r"positions from the length of the cache"),
        ("falcon_alibi", r"ALiBi from a mask of tokens"),
        ("bloom", r"does not accept position_ids"),
        ("qwen3_next", r"layers of linear_attention"),
    ],
)
def test_models_whose_rows_cannot_share_a_forward_are_refused(architecture, reason):
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*use quire\.LLM"):
        DynamicBatch(zoo.build(architecture))
    model = build("qwen2")
    model.config.layer_types = ["indexed_attention"] * 2  # of an unknown index
    with pytest.raises(UnsupportedModel, match="its indexer selects blocks of keys"):
        DynamicBatch(model)
    with pytest.raises(ConfigError, match="training mode"):
        DynamicBatch(model.train())


def test_model_is_unchanged_after_use():
    model = build("llama")
    before = dict(vars(model))
    batch = DynamicBatch(model, batch_size=1)
    handle = batch.submit(PROMPTS[0], 100)
    batch.step()  # columns are allocated as open-ended completions grow
    assert batch.device_meter.peak_bytes < batch._model.shape.slab_bytes(1, handle.final_tokens)
    batch.cancel(handle)
    run(DynamicBatch(model), PROMPTS[:2])

    assert dict(vars(model)) == before
    ids = torch.tensor([[3, 4]])
    assert torch.equal(model(ids).logits, build("llama")(ids).logits)


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        pytest.param(rule, size, marks=[] if i == j else [pytest.mark.slow])
        for i, rule in enumerate(("pd", "orca", "baton_pd"))
        for j, size in enumerate((1, 2, 4))
    ],
)
def test_known_lengths_use_no_more_memory_than_static_batches(rule, size):
    """Prompts are prefilled in their rows, and the slab is allocated once without copies."""
    whole = SamplingParams(temperature=0.0, ignore_eos=True)
    lengths = [20, 3, 31, 12, 1, 8, 25, 2, 17]
    peaks = {}
    for batcher in ("static", rule):
        batch = DynamicBatch(build("llama"), batch_size=size, batcher=batcher)
        for number, new_tokens in enumerate(lengths):
            batch.submit(PROMPTS[number % len(PROMPTS)], new_tokens, sampling=whole)
        batch.run()
        peaks[batcher] = batch.device_meter.peak_bytes
        check_empty(batch)
    assert peaks[rule] <= peaks["static"]
    longest = max(len(PROMPTS[i % len(PROMPTS)]) + new for i, new in enumerate(lengths)) - 1
    if rule != "pd":
        assert peaks[rule] == batch._model.shape.slab_bytes(size, longest)


@pytest.mark.parametrize("rule", ["pd", "static"])
def test_row_that_finishes_before_its_batch_starts_is_freed(rule):
    """Its row is free while the prompts of the other rows still have to be prefilled."""
    prompts, new_tokens = [list(range(40, 80)), [9, 8, 7], [5] * 42], [1, 9, 9]
    result = run(DynamicBatch(build("llama"), batch_size=3, batcher=rule), prompts, new_tokens)
    for handle, prompt, count in zip(result.handles, prompts, new_tokens, strict=True):
        assert handle.token_ids == alone(prompt, count)


@pytest.mark.parametrize(
    ("rule", "options", "error"),
    [*((rule, {}, RuntimeError) for rule in RULES), ("baton_pd", {}, KeyboardInterrupt)],
)
def test_completions_are_unchanged_after_a_failed_step(rule, options, error):
    model, rng, calls = build("llama"), random.Random(len(rule)), []
    expected = [handle.token_ids for handle in run(DynamicBatch(model), EIGHT).handles]
    batch = DynamicBatch(model, batch_size=3, batcher=rule, **options)
    handles = [batch.submit(prompt, 8) for prompt in EIGHT]

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


def test_query_moved_to_a_batch_that_holds_it_is_recomputed_without_swap_space():
    first, second = DynamicBatch(build("llama")), DynamicBatch(build("llama"), swap_space=0)
    handle = first.submit(EIGHT[0], 10)
    for _ in range(4):
        first.step()

    second.adopt(first.extract(handle))
    second.run()

    assert handle.token_ids == alone(EIGHT[0], 10)
    check_empty(first)
    check_empty(second)

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


OF_LLM = [
    *(SamplingParams(use_beam_search=True, beam_width=width) for width in (1, 2)),
    *(SamplingParams(n=1, best_of=2), SamplingParams(prompt_logprobs=0)),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingParams(stop=("x",))}, "create the batch with tokenizer="),
        *(({"sampling": p}, r"use quire\.LLM, which takes the same model object") for p in OF_LLM),
        ({"priority": True}, "priority to be a whole number, got True"),
        ({"deadline_s": float("nan")}, "a time on the batch's clock, got NaN"),
    ],
)
def test_unsupported_request_options_are_refused(options, message):
    batch, params = DynamicBatch(build("llama")), SamplingParams(max_tokens=3)
    with pytest.raises(RequestError, match=message):
        batch.submit([3], **options)
    handles = [batch.submit([3], sampling=params), batch.submit([3], 5, sampling=params)]
    batch.run()
    assert [len(handle.token_ids) for handle in handles] == [3, 5]


# ---- attention masks of a slab -------------------------------------------------------------------


_, FLOAT = -1, torch.float32


VISIBLE = {
    "up to itself without padding": (
        [[_, _, 0, 1, 2], [0, 1, 2, 3, 4]], 1, None, [[[0, 0, 1, 1, 1]], [[1, 1, 1, 1, 1]]],
    ),
    "several new columns are causal": (
        [[0, _, _, 1], [_, 0, 1, 2]], 3, None,
        [[[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]],
    ),
    "a window counts tokens, not the three columns of a gap": (
        [[0, 1, 2, _, _, _, 3], [0, 1, 2, 3, 4, 5, 6]], 1, 3,
        [[[0, 1, 1, 0, 0, 0, 1]], [[0, 0, 0, 0, 1, 1, 1]]],
    ),
    "empty rows and padding attend to one column": (
        [[_, _, _], [0, 1, 2]], 2, None, [[[0, 1, 0], [0, 0, 1]], [[1, 1, 0], [1, 1, 1]]],
    ),
}  # fmt: skip


def test_queries_attend_to_their_rows_and_unsupported_layers_are_refused():
    for case, (positions, columns, window, expected) in VISIBLE.items():
        found = visible(torch.tensor(positions), columns, window)
        assert found[:, 0].int().tolist() == expected, case

    positions = torch.tensor([[0, 1, 2, 3]])
    masks, mistral_mask = (
        MaskRule.of(zoo.build(name).config).make(positions, 1, implementation=impl, dtype=FLOAT)
        for name, impl in (("gemma3", "sdpa"), ("mistral", "eager"))
    )

    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["full_attention"].dtype == torch.bool
    assert mistral_mask.tolist() == [[[[0.0] * 4]]]

    with pytest.raises(UnsupportedModel, match=r"expected attn_implementation sdpa or eager"):
        check_implementation("flex_attention")
    config = zoo.build("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match=r"with layers of linear_attention"):
        MaskRule.of(config)
