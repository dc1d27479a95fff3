"""Runs a step: one flat batch through the decoder, attention over the rows' pages."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.request import Request
from quire.engine.step_plan import StepPlan
from quire.engine.step_size import StepSize
from quire.engine.times import StepTimes
from quire.kernels.backend import AttentionMath
from quire.kv.step import PagedKV, StepAttention
from quire.models.base import AttentionCall, Batch, Decoder, LayerByLayer
from quire.plan.offload.resident import MOST_BATCHES


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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Rows of a step that run as one batch.

    Attributes:
        batch: what the decoder is given.
        wanted: (request, first position, rows) of the logits.
    """

    batch: Batch
    wanted: list[tuple[Request, int, int]]

    def results(self, logits: Tensor) -> list[StepLogits]:
        """The batch's logits, by request."""
        parts = torch.split(logits, [count for _, _, count in self.wanted])
        return [
            StepLogits(request, position, part)
            for (request, position, _), part in zip(self.wanted, parts, strict=True)
        ]


class Runner:
    """Turns step plans into logits.

    Args:
        decoder: computes them.
        kv: the memory.
        times: told what preparing took.
        step: how large a batch is; a larger step runs as several, layer by layer.
    """

    def __init__(self, decoder: Decoder, kv: PagedKV, times: StepTimes, step: StepSize) -> None:
        self._decoder, self._kv, self._times = decoder, kv, times
        self._step = step

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
        prepared = [self._prepare(part) for part in in_batches(rows, self._step.batch_tokens)]
        self._times.prepare_s += time.perf_counter() - started_s
        results = []
        for start in range(0, len(prepared), MOST_BATCHES):
            together = prepared[start : start + MOST_BATCHES]
            logits = self._forward([p.batch for p in together], regime)
            for part, own in zip(together, logits, strict=True):
                results += part.results(own)
        return results

    def _forward(self, batches: list[Batch], regime: int) -> list[Tensor]:
        if len(batches) > 1:
            assert isinstance(self._decoder, LayerByLayer), "larger steps are for those"
            return self._decoder.forward_together(batches, rope_regime=regime)
        (one,) = batches
        ids, places, samples = one.token_ids, one.positions, one.sample_rows
        return [self._decoder.forward(ids, places, samples, one.attention, rope_regime=regime)]

    def _prepare(self, rows: list[tuple[Request, int]]) -> _Prepared:
        rows.sort(key=lambda row: row[1] != 1)  # rows of one token first: they decode together
        token_ids: list[int] = []
        logical: list[int] = []
        for request, tokens in rows:
            start = request.num_computed
            token_ids += request.token_ids(start, start + tokens)
            logical += range(start, start + tokens)
        # RoPE rotates nothing at position 0: keys are computed as their pages store them
        positions = logical if self._kv.rotated else [0] * len(logical)
        wanted = list(_wanted_rows(rows))
        attention = StepAttention(
            self._kv,
            np.array([request.row for request, _ in rows], dtype=np.int64),
            np.array([tokens for _, tokens in rows], dtype=np.int32),
        )
        sample_rows = [row for _, first, count in wanted for row in range(first, first + count)]
        ids, places, samples = map(self._tensor, (token_ids, positions, sample_rows))
        batch = Batch(ids, places, samples, StepBridge(attention))
        return _Prepared(batch, [(r, logical[first], count) for r, first, count in wanted])

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._decoder.device)


def in_batches(
    rows: list[tuple[Request, int]], batch_tokens: int
) -> list[list[tuple[Request, int]]]:
    """Cut a step into batches; a row is never cut.

    In the order in which rows were planned: one may read what an earlier one writes in this step.

    Args:
        rows: (request, tokens).
        batch_tokens: of a batch at most, where it has more than one row.
    """
    batches: list[list[tuple[Request, int]]] = [[]]
    left = batch_tokens
    for request, tokens in rows:
        if tokens > left and batches[-1]:
            batches.append([])
            left = batch_tokens
        batches[-1].append((request, tokens))
        left -= tokens
    return batches


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

    @property
    def wants_inputs(self) -> bool:
        """Whether what layers' attention is given is kept."""
        return self._step.wants_inputs

    def note_input(self, layer: int, inputs: Tensor) -> None:
        """Pass on what a layer's attention is given."""
        self._step.note_input(layer, inputs)

    def note_shift(self, layer: int, cosines: Tensor) -> None:
        """Pass on how much it did in a layer."""
        self._step.note_shift(layer, cosines)
