"""Dynamic batches over tiny models: driven with random arrivals, preemptions and small memories."""

import random
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from quire.hf import DynamicBatch
from quire.hf.dynamic.query import Query, QueryState
from support import zoo
from support.engines import NEW_TOKENS, Expected

RULES = ("static", "pd", "orca", "baton", "baton_pd", "baton_pd_best_fit")
CHANGING = ("orca", "baton", "baton_pd", "baton_pd_best_fit")
TOLERANCE = 1e-4


def build(architecture: str, attention: str = "eager") -> PreTrainedModel:
    """A tiny model whose answers never end early."""
    model = zoo.build(architecture)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation(attention)
    return model


@dataclass
class Seen:
    """Handles by prompt, and of each step: rows of the slab, live rows and bytes of KV."""

    handles: list[Query] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def step(self, batch: DynamicBatch) -> None:
        batch.step()
        self.rows.append(batch.last.rows)
        self.live.append(batch.last.live)
        self.bytes.append(batch.last.kv_bytes)


def run(
    batch: DynamicBatch, prompts: list[list[int]], new_tokens: int | list[int] = NEW_TOKENS
) -> Seen:
    """All at once, to the end."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    seen = Seen([batch.submit(p, count) for p, count in zip(prompts, counts, strict=True)])
    while batch.has_work:
        seen.step(batch)
    return seen


def run_at_random(batch: DynamicBatch, prompts: list[list[int]], seed: int) -> Seen:
    """Submit prompts at random steps with random priorities; sometimes remove a row."""
    rng, seen, coming = random.Random(seed), Seen(), list(prompts)
    while batch.has_work or coming:
        while coming and rng.random() < 0.5:
            seen.handles.append(batch.submit(coming.pop(0), NEW_TOKENS, priority=rng.randrange(3)))
        running = [query for query in seen.handles if query.state is QueryState.RUNNING]
        if running and batch.options.batcher in CHANGING and rng.random() < 0.2:
            batch.preempt(rng.choice(running))
        seen.step(batch)
    return seen


def check_answers(seen: Seen, expected: list[Expected]) -> None:
    """Every query's tokens are those of its run alone."""
    for handle, alone in zip(seen.handles, expected, strict=True):
        assert handle.finish_reason == "length"
        assert alone.agrees(handle.token_ids, TOLERANCE), (handle.number, handle.token_ids)


def check_empty(batch: DynamicBatch) -> None:
    """Every byte was given back."""
    assert batch.device_meter.used_bytes == 0
    assert batch.host_meter.used_bytes == 0
