"""KVzip against Transformers: the prompt is repeated, its tokens are scored and evicted once."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from quire.engine.core import Engine
from quire.policies.kvzip import KVzip
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction_engine import NEW_TOKENS, run
from support import zoo
from support.engines import load
from support.kv_options import kv_config

CAP, CHUNK, SINKS = 24, 32, 4
RULE = f"kvzip:cap={CAP},chunk={CHUNK}"
PROMPTS = {
    "short": [3 + i * i % 60 for i in range(31)],
    "long": [5 + i * i * 7 % 71 for i in range(90)],
    "within the cap": [9 + i % 50 for i in range(CAP)],
}
TOLERANCE = 1e-4


@dataclass
class Compressed:
    """What Transformers computes for a prompt."""

    scores: Tensor  # [layers, KV heads, tokens]
    retained: list[list[int]]  # of each lane, layer by layer
    logits: list[Tensor]


def chunks_of(prompt: list[int], chunk: int = CHUNK) -> list[list[int]]:
    """The model has no tokenizer: no texts, but the last 8 tokens of the chunk before."""
    first = range(0, len(prompt), chunk)
    return [prompt[max(0, i - 8) if i else 0 : i + chunk] for i in first]


def weights_of(model, ids: list[int], cache: DynamicCache) -> tuple[Tensor, ...]:
    """Attention weights [heads, queries, keys] of each layer; the cache grows by the tokens."""
    first = cache.get_seq_length()
    positions = torch.arange(first, first + len(ids))[None]
    found = model(
        torch.tensor([ids]),
        past_key_values=cache,
        position_ids=positions,
        output_attentions=True,
        use_cache=True,
    )
    return tuple(layer[0].float() for layer in found.attentions)


@torch.inference_mode()
def scores_of(architecture: str, prompt: list[int]) -> Tensor:
    """Scores [layers, KV heads, tokens] of a prompt."""
    model = zoo.build(architecture)
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    tokens, best = len(prompt), None
    for ids in chunks_of(prompt):
        weights = torch.stack(weights_of(model, ids, cache))[..., :tokens]
        by_group = weights.unflatten(1, (model.config.num_key_value_heads, -1))
        found = by_group.amax(dim=(2, 3))
        best = found if best is None else torch.maximum(best, found)
        cache.crop(-len(ids))
    assert best is not None
    return best


def kept(scores: Tensor, cap: int) -> list[list[int]]:
    """The sinks and the highest scores of each lane, the lower position first."""
    found = []
    for lane in scores.flatten(0, 1):
        rest = sorted(range(SINKS, len(lane)), key=lambda i: (-float(lane[i]), i))
        found.append(sorted([*range(SINKS), *rest[: cap - SINKS]]))
    return found


@torch.inference_mode()
def outputs_of(architecture: str, prompt: list[int], retained: list[list[int]]) -> list[Tensor]:
    """Logits of a greedy continuation with the retained tokens of each lane."""
    model = zoo.build(architecture)
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    logits = [model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]]
    heads = model.config.num_key_value_heads
    for layer, states in enumerate(cache.layers):
        lanes = retained[layer * heads : (layer + 1) * heads]
        for name in ("keys", "values"):
            old = getattr(states, name)
            new = torch.stack([old[0, head, own] for head, own in enumerate(lanes)])[None]
            setattr(states, name, new)
    for step in range(NEW_TOKENS - 1):
        out = model(
            logits[-1].argmax()[None, None],
            past_key_values=cache,
            position_ids=torch.tensor([[len(prompt) + step]]),
            use_cache=True,
        )
        logits.append(out.logits[0, -1])
    return logits


def jobs(rule: str = RULE) -> dict[str, tuple[list[int], str]]:
    return {name: (prompt, rule) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("architecture", ["llama"])
@pytest.mark.parametrize("by_layer", [True, False], ids=["by layer", "by chunk"])
def test_scores_retained_tokens_and_outputs_are_those_of_transformers(
    architecture, by_layer, monkeypatch
):
    seen: dict[int, list[Tensor]] = {}

    def score(self, view):
        found = view.statistic(self.statistics[0])
        seen.setdefault(view.prompt_tokens, []).append(found.clone())
        return found

    monkeypatch.setattr(KVzip, "score", score)
    model = load(architecture)
    if not by_layer:
        monkeypatch.setattr(type(model.decoder), "prepare_by_layer", lambda self: "for the test")
    kv = kv_config(
        memory="8MiB", page_tokens=4, evict=RULE, record_evictions=True, enable_prefix_caching=False
    )
    found = run(jobs(), engine=Engine(model, kv, ScheduleConfig(max_num_seqs=1)))
    assert found.usages["within the cap"].evicted_tokens == 0
    for name, prompt in list(PROMPTS.items())[:2]:
        scores = scores_of(architecture, prompt)
        own = torch.cat(seen[len(prompt)])
        assert (own - scores.flatten(0, 1)).abs().max() <= TOLERANCE
        [(computed, retained)] = found.traces()[name]
        assert computed == len(prompt)
        assert retained == kept(scores, CAP)
        expected = outputs_of(architecture, prompt, retained)
        for ours, theirs in zip(found.logits[name], expected, strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE
