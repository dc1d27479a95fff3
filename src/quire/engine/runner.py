"""Runs a step: one flat batch through the decoder, attention over the rows' pages."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.request import Request
from quire.engine.step_plan import StepPlan
from quire.engine.times import StepTimes
from quire.kernels.backend import AttentionMath
from quire.kv.step import PagedKV, StepAttention
from quire.models.base import AttentionCall, Decoder


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step computed.

    Attributes:
        request: whose rows these are.
        first_position: logical position of the first row's token.
        logits: [rows, vocab]; row i belongs to the token at first_position + i.
    """

    request: Request
    first_position: int
    logits: Tensor


class Runner:
    """Turns step plans into logits, and notes in `times` what preparing took."""

    def __init__(self, decoder: Decoder, kv: PagedKV, times: StepTimes) -> None:
        self._decoder, self._kv, self._times = decoder, kv, times

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[StepLogits]:
        """Process a step's tokens.

        Args:
            plan: the memory has grown for it.

        Returns:
            For each request that needs any: the logits of its last token when it was the last
            known one, or of all its tokens when prompt log-probabilities were asked for.
        """
        results = []
        for regime in sorted({r.rope_regime for r in plan.requests}):
            rows = [
                (request, tokens)
                for request, tokens in zip(plan.requests, plan.tokens, strict=True)
                if request.rope_regime == regime
            ]
            results += self._run_regime(rows, regime)
        return results

    def _run_regime(self, rows: list[tuple[Request, int]], regime: int) -> list[StepLogits]:
        started_s = time.perf_counter()
        rows.sort(key=lambda row: row[1] != 1)  # rows of one token first: they decode together
        token_ids: list[int] = []
        positions: list[int] = []
        for request, tokens in rows:
            start = request.num_computed
            token_ids += request.token_ids(start, start + tokens)
            # at position 0 nothing turns: keys come as their pages hold them
            positions += range(start, start + tokens) if self._kv.rotated else [0] * tokens
        wanted = list(_wanted_rows(rows))
        attention = StepAttention(
            self._kv,
            np.array([request.row for request, _ in rows], dtype=np.int64),
            np.array([tokens for _, tokens in rows], dtype=np.int32),
        )
        sample_rows = [row for _, first, count in wanted for row in range(first, first + count)]
        ids, places, samples = map(self._tensor, (token_ids, positions, sample_rows))
        self._times.prepare_s += time.perf_counter() - started_s
        bridge = StepBridge(attention)
        logits = self._decoder.forward(ids, places, samples, bridge, rope_regime=regime)
        parts = torch.split(logits, [count for _, _, count in wanted])
        return [
            StepLogits(request, positions[first], part)
            for (request, first, _), part in zip(wanted, parts, strict=True)
        ]

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._decoder.device)


def _wanted_rows(rows: list[tuple[Request, int]]) -> Iterator[tuple[Request, int, int]]:
    """(request, first row of the flat batch, rows) whose logits are needed."""
    start = 0
    for request, tokens in rows:
        if request.scores_prompt:
            yield request, start, tokens
        elif tokens == request.num_uncomputed and request.params.max_tokens:
            yield request, start + tokens - 1, 1
        start += tokens


class StepBridge:
    """Lets a decoder's layers talk to a step's attention."""

    def __init__(self, step: StepAttention) -> None:
        self._step = step

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Pass the call on; the lane group knows the window."""
        math = AttentionMath(call.scale, call.softcap, call.sinks)
        return self._step.attend(call.layer, math, query, key, value, call.rotary)

    @property
    def wants_shift(self) -> bool:
        """Whether any row remembers how much attention changes the residual stream."""
        return self._step.wants_shift

    def note_shift(self, layer: int, cosines: Tensor) -> None:
        """Pass on how much it did in a layer."""
        self._step.note_shift(layer, cosines)
