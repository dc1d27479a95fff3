"""Every query's tokens equal those of its run alone: dense and paged, under every batcher."""

import random
from functools import cache, partialmethod
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from benchmarks.batch_max.speed import rows_that_fit
from quire.cli.plan_maximize import BatchQuestion, batch_report
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits
from quire.hf import DynamicBatch
from quire.kv.dense.slab import DenseSlab
from quire.models.loader import load_model
from quire.models.source import find_model
from quire.plan.ceilings import NotUsable
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.batchers import BATCHERS
from quire.scheduler.peaks import need_of
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCALED_DOWN
from support.dynamic import CHANGING, RULES, build, check_answers, check_empty, run, run_at_random
from support.engines import Expected, answer, expect, greedy, load, make_prompts
from support.kv_options import kv_config

PROMPTS = make_prompts(10, 60, seed=5)
BOTH = ("llama", "opt", "mistral", "gemma3", "qwen2_window", "glm_moe_dsa")  # sdpa and eager
ARCHITECTURES = (
    *("llama", "opt", "mistral", "gemma3", "gpt2", "qwen2_window", "gpt_oss", "mixtral"),
    *("gemma3n", "gemma4", "deepseek_v3", "glm_moe_dsa"),
)
HOW = {"plain": {}, "small_host": {"scale_at": 0.6, "swap_space": 4000}, "tight": {"scale_at": 0.6}}
PAIRWISE = [  # every rule, every architecture and every way at least twice
    (architecture, RULES[i % len(RULES)], list(HOW)[i % len(HOW)], i)
    for i, architecture in enumerate([*ARCHITECTURES, *reversed(ARCHITECTURES)])
]
ALL = [pytest.param(*c, marks=pytest.mark.slow) for c in product(ARCHITECTURES, RULES, HOW, (0, 1))]


@cache
def expected_of(architecture: str) -> list[Expected]:
    return expect(architecture, PROMPTS)


@pytest.mark.parametrize(("architecture", "rule", "how", "seed"), [*PAIRWISE, *ALL])
def test_other_rows_change_no_logits(architecture, rule, how, seed):
    """`scale_at` is a fraction of the peak of a run without it."""
    options = dict(HOW[how]) | {"batch_size": 4, "batcher": rule}
    if "scale_at" in options:
        batch = DynamicBatch(build(architecture), batch_size=4, batcher=rule)
        run(batch, PROMPTS)
        options["scale_at"] = int(batch.device_meter.peak_bytes * options["scale_at"])
    attention = "sdpa" if architecture in BOTH and seed % 2 else "eager"
    batch = DynamicBatch(build(architecture, attention), **options)
    seen = run_at_random(batch, PROMPTS, seed)

    check_answers(seen, expected_of(architecture))
    check_empty(batch)
    if rule in CHANGING and how != "tight":
        assert any(handle.preemptions for handle in seen.handles)


# ---- what masked slots hold ------------------------------------------------------------------


def valid_only(module, query, key, value, attention_mask, scaling=None, **_options):
    """Eager attention over only the slots that each query attends to."""
    (rows, heads, queries, dim), out = query.shape, torch.zeros_like(query)
    scale = dim**-0.5 if scaling is None else scaling
    for row, i in product(range(rows), range(queries)):
        seen = attention_mask[min(row, len(attention_mask) - 1), 0, i] == 0
        keys, values = (
            side[row][:, seen].repeat_interleave(heads // side.shape[1], dim=0)
            for side in (key, value)
        )
        weights = torch.softmax(query[row, :, i, None] @ keys.transpose(1, 2) * scale, dim=-1)
        out[row, :, i] = (weights @ values)[:, 0]
    return out.transpose(1, 2), None


@pytest.mark.parametrize("rule", ["static", "baton", "baton_pd"])
@pytest.mark.parametrize(
    ("architecture", "module"),
    [("llama", modeling_llama), ("mistral", modeling_mistral), ("gpt2", modeling_gpt2)],
)
def test_nan_in_every_slot_without_a_token_changes_no_logits(
    monkeypatch, architecture, module, rule
):
    monkeypatch.setattr(module, "eager_attention_forward", valid_only)
    with_nan = partialmethod(DenseSlab.__init__, filler=float("nan"))
    monkeypatch.setattr(DenseSlab, "__init__", with_nan)
    batch = DynamicBatch(build(architecture), batch_size=3, batcher=rule)
    check_answers(run(batch, PROMPTS[:5]), expect(architecture, PROMPTS[:5]))


@pytest.mark.parametrize("filler", [float("nan"), float("-inf")])
def test_stock_attention_reads_slots_without_a_token(monkeypatch, filler):
    """The test above can fail: with these slots, Transformers' attention gives NaN."""
    monkeypatch.setattr(DenseSlab, "__init__", partialmethod(DenseSlab.__init__, filler=filler))

    seen = run(DynamicBatch(build("llama"), batch_size=3), PROMPTS[:5])

    assert any("NaN" in str(handle.finish_reason) for handle in seen.handles)


# ---- positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["static", "baton", "baton_pd"])
def test_positions_are_logical_in_every_column(rule):
    """OPT has a table of positions: the position of a token is its index in its sequence."""
    model, checked = build("opt"), 0
    table = model.model.decoder.embed_positions
    looked_up = table.forward = Mock(wraps=table.forward)
    batch = DynamicBatch(model, batch_size=3, batcher=rule)
    handles = [batch.submit(prompt, 6) for prompt in PROMPTS[:5]]
    while batch.has_work:
        batch.step()
        positions = looked_up.call_args.kwargs["position_ids"]
        for query in handles:
            if query.row is not None:  # its KV ends with the token this step has read
                assert int(positions[query.row, -1]) == query.num_to_read - 1
                checked += 1
    assert checked >= 5 * 4


# ---- text and log-probabilities ------------------------------------------------------------------


def of_engine(prompts, params, model):
    engine = Engine(model, kv_config(memory="16MiB"), ScheduleConfig(max_num_seqs=4))
    requests = [
        GenerationRequest(prompt, params, request_id=str(i)) for i, prompt in enumerate(prompts)
    ]
    builders = [OutputBuilder(r.request_id, tuple(r.prompt), r) for r in requests]
    outputs = {}
    for delta in answer(engine, requests).deltas:
        outputs[delta.request_id] = builders[int(delta.request_id)].add(delta)
    return [outputs[request.request_id] for request in requests]


def run_and_compare(batch, prompts, params, expected):
    handles = [batch.submit(prompt, sampling=params) for prompt in prompts]
    batch.run()
    for handle, output in zip(handles, expected, strict=True):
        assert handle.token_ids == list(output.token_ids)
        assert handle.finish_reason == output.finish_reason
    return handles


@pytest.fixture(scope="module")
def tiny():
    """A model with texts for an engine, and a function that makes a batch of it."""
    folder, _ = find_model("quire-tiny")
    loaded = load_model(folder, dtype="float32")

    def make_batch(**options):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return DynamicBatch(model, tokenizer=loaded.tokenizer, **options)

    return loaded, make_batch


def test_stop_texts_end_outputs_as_in_the_engine(tiny):
    loaded, make_batch = tiny
    prompts = [loaded.tokenizer.encode(f"<|doc|>The {word}") for word in ("city", "river", "king")]
    plain = of_engine(prompts, SamplingParams(max_tokens=24, temperature=0), loaded)
    stop = tuple({output.text[6:9] for output in plain if len(output.text) > 9})
    params = SamplingParams(max_tokens=24, temperature=0, stop=stop)
    expected = of_engine(prompts, params, loaded)
    handles = run_and_compare(make_batch(batch_size=2), prompts, params, expected)

    assert [handle.text for handle in handles] == [output.text for output in expected]
    assert [handle.stop_reason for handle in handles] == [o.stop_reason for o in expected]
    assert any(handle.stop_reason in stop for handle in handles)


@pytest.mark.parametrize("batcher", CHANGING)
def test_log_probabilities_are_those_of_the_engine(batcher):
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    expected = of_engine(PROMPTS[:5], params, load("llama"))
    batch = DynamicBatch(build("llama"), batch_size=3, batcher=batcher)
    handles = run_and_compare(batch, PROMPTS[:5], params, expected)
    for handle, output in zip(handles, expected, strict=True):
        for ours, theirs in zip(handle.logprobs, output.logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert abs(ours.logprob - theirs.logprob) <= 1e-4


def test_text_and_log_probabilities_move_with_an_extracted_query(tiny):
    loaded, make_batch = tiny
    prompt = loaded.tokenizer.encode("<|doc|>The city")
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, ignore_eos=True)
    [expected] = of_engine([prompt], params, loaded)
    first, second = make_batch(), make_batch()
    handle = first.submit(prompt, sampling=params)
    for _ in range(5):
        first.step()
    second.adopt(first.extract(handle))
    second.run()

    assert handle.text == expected.text
    assert len(handle.logprobs) == 16


# ---- batchers of engines -------------------------------------------------------------------------


ENGINE_ARCHITECTURES = ("llama", "opt", "mistral", "gemma3", "gpt2")  # mistral: windows only
FULL = ("llama", "opt", "gpt2")
STORED = {
    "plain": {},
    "average": {"evict": "average:cap=24,every=6"},
    "int8": {"codec": "int8"},
    "average, int8": {"evict": "average:cap=24,every=6", "codec": "int8"},
}
BATCHER_TEXTS = (
    *BATCHERS,
    *("pd:ahead=5", "baton_pd:prefill=sync", "baton_pd:hold=host,queue=4"),
    "baton_pd_best_fit:hold=host,tokens=6,patience=1",
)
# every batcher, every architecture, and every way to store KV; `alone` is shared by equal pairs
QUICK = [
    *(("continuous", "llama", "average, int8"), ("static", "gpt2", "plain")),
    *(("pd", "mistral", "int8"), ("orca", "gemma3", "plain"), ("baton_pd", "opt", "average")),
    *(("baton_pd_best_fit", "mistral", "int8"), ("pd:ahead=5", "gpt2", "plain")),
    ("baton_pd:prefill=sync", "gpt2", "plain"),
    ("baton_pd:hold=host,queue=4", "llama", "average, int8"),
    ("baton_pd_best_fit:hold=host,tokens=6,patience=1", "opt", "average"),
]
COUNT, LONGEST, ROWS, PAGE_TOKENS = 9, 40, 5, 4


model_of = cache(load)


def params_of(number: int) -> SamplingParams:
    """Greedy, or sampled with all options that keep state for a row."""
    if number % 3:
        return greedy(24 + number)
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    drawn = {"temperature": 0.9, "seed": number, "stop_token_ids": (5, 9), "ignore_eos": True}
    return SamplingParams(max_tokens=28 + number, **drawn, **penalties)


QUERY_PROMPTS = make_prompts(COUNT, LONGEST, seed=7)


@cache
def alone(architecture: str, stored: str) -> dict[str, list[int]]:
    found, kv = {}, kv_config(memory="4MiB", page_tokens=PAGE_TOKENS, **STORED[stored])
    for number, prompt in enumerate(QUERY_PROMPTS):
        engine = Engine(model_of(architecture), kv, ScheduleConfig(max_num_seqs=1))
        request = GenerationRequest(prompt, params_of(number), request_id=f"r{number}")
        found |= {name: tokens for (name, _), tokens in answer(engine, [request]).tokens.items()}
    return found


def engine_of(batcher: str, architecture: str, stored: str, rooms: float) -> Engine:
    steps = {"max_num_seqs": ROWS, "max_num_batched_tokens": 32, "chunk_tokens": 16}
    limits = {"urgent": -1, "scale_down_at": 0.4, "preempt": "swap"}
    schedule = ScheduleConfig(batcher=batcher, **steps, **limits)
    kv = {"page_tokens": PAGE_TOKENS, "swap_space": "4MiB", **STORED[stored]}
    size = 1 << 14
    while True:
        try:
            engine = Engine(model_of(architecture), kv_config(memory=size, **kv), schedule)
            engine.submit(GenerationRequest([2] * LONGEST, SamplingParams(max_tokens=28 + COUNT)))
        except (NeverFits, ConfigError):
            if size > 4 << 20:
                raise  # the memory is not the reason
            size += size // 8
            continue
        [[_, largest]] = engine._outputs.unfinished()
        need = need_of(largest, largest.final_tokens)
        size = max(size, int(rooms * engine.scheduler.peaks.peak_bytes(need)))
        return Engine(model_of(architecture), kv_config(memory=size, **kv), schedule)


def check_batcher(
    batcher: str, architecture: str, stored: str, *, rooms: float = 2.4, seed: int = 1
) -> list[str]:
    engine = engine_of(batcher, architecture, stored, rooms)
    expected, rng, reasons, tokens = alone(architecture, stored), random.Random(seed), [], {}
    engine.events.subscribe(
        lambda event: reasons.append(event.data["reason"]) if event.kind == "preempted" else None
    )
    left = list(enumerate(QUERY_PROMPTS))
    rng.shuffle(left)
    ended: dict[str, str] = {}
    while left or engine.has_work:
        for number, prompt in [left.pop() for _ in range(min(rng.randint(0, 4), len(left)))]:
            own = {"request_id": f"r{number}", "priority": -1 if number % 4 == 3 else 0}
            engine.submit(GenerationRequest(prompt, params_of(number), **own))
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                ended[delta.request_id] = delta.finish_reason
        if tokens.get("r8") and "r8" not in ended:
            engine.cancel("r8")
        engine.check()

    assert sorted(ended) == sorted(expected)
    assert ended.pop("r8") == "abort"
    assert {name: tokens[name] for name in ended} == {name: expected[name] for name in ended}
    assert tokens["r8"] == expected["r8"][: len(tokens["r8"])]
    assert not engine.pool.host.used_bytes
    return reasons


@pytest.mark.parametrize(("batcher", "architecture", "stored"), QUICK)
def test_tokens_equal_those_of_each_query_alone(batcher, architecture, stored):
    reasons = check_batcher(batcher, architecture, stored)

    if architecture in FULL and "evict" not in STORED[stored]:  # otherwise rows stop growing
        assert SCALED_DOWN in reasons


@pytest.mark.slow
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("architecture", ENGINE_ARCHITECTURES)
@pytest.mark.parametrize("batcher", BATCHER_TEXTS)
def test_tokens_equal_in_every_combination(batcher, architecture, stored):
    if architecture == "mistral" and "evict" in STORED[stored]:
        pytest.skip("every layer has a window already: nothing is left to a rule")
    for seed in range(2):
        check_batcher(batcher, architecture, stored, rooms=2.2 + seed, seed=seed)


@pytest.mark.parametrize(
    "evict",
    ["h2o:cap=60,every=8", "expected_attention:cap=400"],  # the second is never passed
)
def test_planned_batches_equal_the_batches_an_engine_admits(evict):
    """Those that `quire plan --maximize-batch` names."""
    sizes = {"prompt_tokens": 100, "new_tokens": 20, "kv_bytes": 256 << 10}
    question = BatchQuestion(**sizes, kv_codec="float32", evict=evict)
    model = load("llama")
    report = batch_report(model.spec, question, lambda rule: NotUsable("not measured"))

    for arm in report.arms:
        kv = kv_config(memory="256KiB", evict=arm.evict, enable_prefix_caching=False)
        assert arm.rows == rows_that_fit(model, kv, 100, 20)
