"""Prefill times of the same prompts by token budget of a step."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.common.models import random_model
from benchmarks.common.workload import QUICK_WORKLOAD, Workload
from benchmarks.throughput.arms import QuireArm
from quire.config.kv_config import AttentionName

BUDGETS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Configuration of the sweep.

    Attributes:
        workload: prompts; one token is generated for each.
        budgets: most tokens of a step.
        repeats: measured rounds of all budgets, after one warm-up round.
        attention: attention backend.
    """

    workload: Workload = field(default_factory=lambda: Workload(new_tokens=1))
    budgets: tuple[int, ...] = BUDGETS
    repeats: int = 5
    attention: AttentionName = "auto"


QUICK_PREFILL = PrefillConfig(
    workload=Workload(
        model=QUICK_WORKLOAD.model,
        prompts=QUICK_WORKLOAD.prompts,
        prompt_tokens=QUICK_WORKLOAD.prompt_tokens,
        new_tokens=1,
    ),
    budgets=(32, 64),
    repeats=2,
)


def measure_prefill(config: PrefillConfig) -> Iterator[dict[int, float]]:
    """Yield, for each round, the prefill time of all prompts in seconds by budget."""
    model = random_model(config.workload.shape(), dtype=torch.bfloat16)
    arms = {
        budget: QuireArm(
            model, config.workload, attention=config.attention, max_num_batched_tokens=budget
        )
        for budget in config.budgets
    }
    for i in range(config.repeats + 1):
        elapsed_s = {budget: arm.run().total_s for budget, arm in arms.items()}
        if i:
            yield elapsed_s


def summarise(rounds: Sequence[Mapping[int, float]]) -> dict[str, int | float]:
    """Median seconds by budget, the best budget, and the other times over the best time."""
    medians_s = {budget: statistics.median(r[budget] for r in rounds) for budget in rounds[0]}
    best = min(medians_s, key=medians_s.__getitem__)
    claims: dict[str, int | float] = {"best_step_tokens": best}
    for budget, median_s in medians_s.items():
        claims[f"prefill_s_{budget}"] = median_s
        ratios = [found[budget] / found[best] for found in rounds]
        claims[f"over_best_{budget}"] = statistics.median(ratios)
    return claims
