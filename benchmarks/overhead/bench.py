"""Fraction of a decode step spent on bookkeeping: scheduler, page tables, flat batch."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.common.models import llama_125m, random_model
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """The workload.

    Attributes:
        rows: sequences that decode together.
        prompt_tokens: length of each sequence when the measurement begins.
        repeats: groups of steps measured.
        steps: decode steps in a group.
    """

    rows: int = 256
    prompt_tokens: int = 512
    repeats: int = 5
    steps: int = 4


def measure_overhead(config: OverheadConfig) -> Iterator[dict[str, float]]:
    """Decode with the 125M random model in bfloat16; yield one result for each group of steps.

    A result has `step_s` (without sampling), `schedule_s`, `prepare_s`, and `share`: the sum of the
    last two over `step_s`.
    """
    engine = _filled_engine(config)
    for _ in range(config.repeats):
        before = engine.stats().times
        for _ in range(config.steps):
            engine.step()
        after = engine.stats().times
        step_s = (after.steps_s - before.steps_s) / config.steps
        schedule_s = (after.schedule_s - before.schedule_s) / config.steps
        prepare_s = (after.prepare_s - before.prepare_s) / config.steps
        yield {
            "step_s": step_s,
            "schedule_s": schedule_s,
            "prepare_s": prepare_s,
            "share": (schedule_s + prepare_s) / step_s,
        }


def _filled_engine(config: OverheadConfig) -> Engine:
    """Create an engine whose rows have all finished prefill and started to decode."""
    model = random_model(llama_125m(), dtype=torch.bfloat16)
    new_tokens = config.repeats * config.steps + 2 * config.rows
    kv_bytes = model.spec.kv_bytes_per_token(2) * (config.prompt_tokens + new_tokens) * config.rows
    engine = Engine(
        model,
        KVConfig(memory=kv_bytes),
        ScheduleConfig(max_num_seqs=config.rows),
    )
    rng = random.Random(0)
    for _ in range(config.rows):
        prompt = [rng.randrange(model.spec.vocab_size) for _ in range(config.prompt_tokens)]
        engine.submit(
            GenerationRequest(prompt, SamplingParams(max_tokens=new_tokens, temperature=0.0))
        )
    while any(r.num_uncomputed > 1 for r in engine.scheduler.running) or engine.stats().num_waiting:
        engine.step()
    return engine


def summarise(results: list[dict[str, float]]) -> dict[str, float]:
    """Claim: median fraction of a decode step spent on bookkeeping."""
    return {"bookkeeping_share": statistics.median(r["share"] for r in results)}
