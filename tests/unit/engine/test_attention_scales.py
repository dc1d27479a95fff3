"""Rules compute attention with the scale of each layer; statistics of chunked prompts."""

import numpy as np
import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.engine.runner import StepBridge
from quire.hf import QuireCache
from quire.hf.cache import retained_positions
from quire.kernels.gathered import GatheredAttention
from quire.kv.lane_reader import LaneReader
from quire.kv.paged_kv import allocate_kv
from quire.kv.step import StepAttention
from quire.layout.layout import layout_for
from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing, ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from quire.models.base import attention_math
from support import zoo
from support.engines import greedy, load
from support.flat import sequences
from support.kv_options import kv_config

LAYERS = 4
WINDOW, CAP = 8, 24
PROMPT = [3 + i * i % 60 for i in range(60)]
RULES = {
    "snapkv": f"snapkv:window={WINDOW},kernel=1",
    "tova": "tova:scope=lane",
    "kvcrush": f"kvcrush:base=(snapkv:window={WINDOW},kernel=1),share=0,sets=head",
}


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        *(("llama", [8**-0.5] * LAYERS), ("gemma3", [16**-0.5] * 2 * LAYERS)),
        *(("granite", [0.2] * LAYERS), ("gemma4", [1.0] * 10), ("gpt2", [8**-0.5] * LAYERS)),
        ("gpt2_scale_by_layer", [8**-0.5 / n for n in (1, 2, 3, 4)]),
        ("wide_llama", [16**-0.5] * LAYERS),
    ],
)
def test_scales_are_those_of_the_calls_of_each_layer(name, scales):
    model = load(name, times=2)
    assert [math.scale for math in attention_math(model.decoder)] == pytest.approx(scales)


@pytest.fixture(scope="module", params=["gpt2", "gpt2_scale_by_layer", "bloom"])
def name(request):
    return request.param


@torch.inference_mode()
def attended_most(name, rule):
    """For each layer and head, the CAP tokens with most attention from the last queries."""
    model = zoo.build(name, times=2)
    window = 1 if rule == "tova" else WINDOW
    kept = []
    for [weights] in model(torch.tensor([PROMPT]), output_attentions=True).attentions:
        sums = weights[:, -window:].sum(dim=1)
        if rule != "tova":
            sums[:, -window:] = torch.inf
        kept.append([sorted(head.topk(CAP).indices.tolist()) for head in sums])
    return kept


def kept_by_engine(engine, rule):
    engine.submit(GenerationRequest(PROMPT, greedy(3)))
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            if len(request.output_token_ids) == 2:
                row = request.memory.row
                kept = [retained_positions(engine.pool.kv, row, i) for i in range(LAYERS)]
                return [[[p for p in head if p < len(PROMPT)] for head in of] for of in kept]
    raise AssertionError("the request has no output")


def options(rule):
    evict = f"{RULES[rule]},cap={CAP},when=prefill_end"
    return {"memory": "4MiB", "page_tokens": 4, "evict": evict}


@pytest.mark.parametrize("rule", RULES)
def test_engine_and_cache_retain_the_tokens_that_the_model_attends_to(name, rule):
    engine = Engine(load(name, times=2), kv_config(**options(rule)))
    assert kept_by_engine(engine, rule) == attended_most(name, rule)
    model = zoo.build(name, times=2)
    with QuireCache(model, RULES[rule], CAP, when="prefill_end") as cache:
        model(torch.tensor([PROMPT]), past_key_values=cache)
        kept = [cache.retained_positions(0, layer) for layer in range(LAYERS)]
    assert kept == attended_most(name, rule)


@pytest.mark.parametrize("rule", RULES)
def test_engine_with_a_restored_prefix_retains_the_same_tokens(name, rule, tmp_path):
    disk = {"disk_memory": "32MiB", "kv_load": "whole", "disk_path": str(tmp_path / "kv")}
    for _ in range(2):
        engine = Engine(load(name, times=2), kv_config(**options(rule), **disk))
        kept = kept_by_engine(engine, rule)
        restored = engine.events.newest(["prefix_loaded"])
        engine.close()
    assert restored
    assert kept == attended_most(name, rule)


# ---- statistics of steps -------------------------------------------------------------------------


CPU = torch.device("cpu")
STATISTICS = (AttentionSum(), QueryRing(4), QueryMoments(2), ResidualSimilarity())


def statistics_after_prefill(name, chunk_ends):
    """Prefill a prompt in chunks that end at `chunk_ends`; return decoder and statistics."""
    decoder = TransformersDecoder(zoo.build(name))
    assert [decoder.prepare(statistic) for statistic in STATISTICS] == [None] * 4
    layout = layout_for(
        decoder.spec, codec="float32", page_tokens=4, evicting=True, statistics=STATISTICS
    )
    backend = GatheredAttention(CPU)
    kv = allocate_kv(layout, layout.smallest_sequence_bytes * 40, 2, device=CPU, backend=backend)
    row = kv.memory.start()
    (prompt,), start = sequences(17, vocab_size=zoo.VOCAB_SIZE), 0
    for end in chunk_ends:
        rows, tokens = np.array([row]), np.array([end - start], dtype=np.int32)
        kv.memory.grow(rows, tokens)
        attention = StepBridge(StepAttention(kv, rows, tokens))
        positions = torch.arange(start, end)
        decoder.forward(prompt[start:end], positions, positions[:0], attention)
        start = end
    return decoder, LaneReader(kv, "full", row).statistics


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_statistics_are_equal_for_chunks_single_tokens_and_the_whole_prompt(name):
    decoder, whole = statistics_after_prefill(name, [17])
    full = sum(layer.window is None for layer in decoder.spec.layers)
    for chunk_ends in ([6, 7, 15, 17], range(1, 18)):
        _, chunked = statistics_after_prefill(name, chunk_ends)
        for statistic, numbers in whole.items():
            tolerance = {"atol": 1e-4, "rtol": 1e-4}
            torch.testing.assert_close(chunked[statistic], numbers, **tolerance, msg=statistic)

    assert len(whole) == 4
    lanes = full * decoder.spec.num_kv_heads
    torch.testing.assert_close(whole["attention_sum.mean"].sum(dim=1), torch.full((lanes,), 17.0))
    assert whole["residual_similarity"][:, 0, 1].tolist() == [17] * lanes
    assert whole["query_moments.2"][:, 0, 0].tolist() == [15] * lanes
    assert whole["query_ring.4"][0, :, -1].tolist() == [17, 14, 15, 16]
