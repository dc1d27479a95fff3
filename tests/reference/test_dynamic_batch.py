"""Every query's tokens equal those of its run alone: all batchers, arrivals, preemptions, sizes."""

from functools import cache, partialmethod

import pytest
import torch
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from quire.hf import DynamicBatch
from quire.kv.dense.slab import DenseSlab
from support.dynamic import CHANGING, RULES, build, check_answers, check_empty, run, run_at_random
from support.engines import Expected, expect, make_prompts

PROMPTS = make_prompts(10, 60, seed=5)
ARCHITECTURES = (
    "llama",
    "opt",
    "mistral",
    "gemma3",
    "gpt2",
    "qwen2_window",
    "gpt_oss",
    "mixtral",
    "gemma3n",
    "gemma4",
    "deepseek_v3",
    "glm_moe_dsa",
)
BOTH = (
    "llama",
    "opt",
    "mistral",
    "gemma3",
    "qwen2_window",
    "glm_moe_dsa",
)  # with sdpa as with eager
HOW = {
    "plain": {},
    "small_host": {"scale_at": 0.6, "swap_space": 4_000},
    "tight": {"scale_at": 0.6},
}
PAIRWISE = [  # every rule, every architecture and every way at least twice
    (architecture, RULES[i % len(RULES)], list(HOW)[i % len(HOW)], i)
    for i, architecture in enumerate([*ARCHITECTURES, *reversed(ARCHITECTURES)])
]
ALL = [
    (architecture, rule, how, seed)
    for architecture in ARCHITECTURES
    for rule in RULES
    for how in HOW
    for seed in range(2)
]


@cache
def expected_of(architecture: str) -> list[Expected]:
    return expect(architecture, PROMPTS)


def options(architecture: str, rule: str, how: str) -> dict[str, object]:
    """`scale_at` is a fraction of the peak of a run without it."""
    named = dict(HOW[how]) | {"batch_size": 4, "batcher": rule}
    if "scale_at" in named:
        batch = DynamicBatch(build(architecture), batch_size=4, batcher=rule)
        run(batch, PROMPTS)
        named["scale_at"] = int(batch.device_meter.peak_bytes * named["scale_at"])
    return named


def check(architecture: str, rule: str, how: str, seed: int) -> None:
    attention = "sdpa" if architecture in BOTH and seed % 2 else "eager"
    named = options(architecture, rule, how)
    batch = DynamicBatch(build(architecture, attention), **named)

    seen = run_at_random(batch, PROMPTS, seed)

    check_answers(seen, expected_of(architecture))
    check_empty(batch)
    if rule in CHANGING and how != "tight":
        assert any(handle.preemptions for handle in seen.handles)


@pytest.mark.parametrize(("architecture", "rule", "how", "seed"), PAIRWISE)
def test_other_rows_change_no_logits(architecture, rule, how, seed):
    check(architecture, rule, how, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "rule", "how", "seed"), ALL)
def test_other_rows_change_no_logits_in_any_combination(architecture, rule, how, seed):
    check(architecture, rule, how, seed)


# ---- what masked slots hold ------------------------------------------------------------------


def valid_only(module, query, key, value, attention_mask, scaling=None, **_options):
    """Eager attention over only the slots that each query attends to."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    rows, _, queries, _ = query.shape
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for row in range(rows):
        for i in range(queries):
            mask = attention_mask[min(row, len(attention_mask) - 1), 0, i]
            seen = mask == 0
            keys = key[row][:, seen].repeat_interleave(groups, dim=0)
            values = value[row][:, seen].repeat_interleave(groups, dim=0)
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
    prompts = PROMPTS[:5]
    expected = expect(architecture, prompts)

    seen = run(DynamicBatch(build(architecture), batch_size=3, batcher=rule), prompts)

    check_answers(seen, expected)


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
    model = build("opt")
    looked_up: list[tuple[torch.Tensor, torch.Tensor]] = []
    embed = model.model.decoder.embed_positions.forward

    def looking(mask, past=0, position_ids=None):
        looked_up.append((mask, position_ids))
        return embed(mask, past, position_ids=position_ids)

    model.model.decoder.embed_positions.forward = looking
    batch = DynamicBatch(model, batch_size=3, batcher=rule)
    handles = [batch.submit(prompt, 6) for prompt in PROMPTS[:5]]
    checked = 0
    while batch.has_work:
        batch.step()
        _, positions = looked_up[-1]
        for query in handles:
            if query.row is not None:  # its KV ends with the token this step has read
                assert int(positions[query.row, -1]) == query.num_to_read - 1
                checked += 1
    assert checked >= 5 * 4
