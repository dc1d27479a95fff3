"""Runs of Transformers' `generate` and of its continuous batching; without Quire."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

# The attention of continuous batching multiplies every query of a step with every key of the step,
# across all requests, so on a CPU few requests at once are fastest: of 2, 4, 8 and all, 4 in steps
# of 512 tokens.
PAGE_TOKENS, STEP_TOKENS, STEP_REQUESTS = 64, 512, 4


class StepClock(StoppingCriteria):
    """Records the time of each step of `generate`; stops no generation.

    Args:
        now: returns the time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.times_s: list[float] = []
        self._now = now

    def __call__(self, input_ids: torch.Tensor, scores: object, **_options: object) -> torch.Tensor:
        """See StoppingCriteria."""
        self.times_s.append(self._now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def greedy(
    new_tokens: int | None, *, end_token: int | None = None, **options: Any
) -> GenerationConfig:
    """Options of greedy generation; by default no token ends it."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=end_token,
        **options,
    )


def median_gap(times_s: Sequence[float]) -> float:
    """Median time between two steps; 0 for one step."""
    gaps = [after - before for before, after in pairwise(times_s)]
    return statistics.median(gaps) if gaps else 0.0
