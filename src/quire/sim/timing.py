"""Predicted step time: lower bounds of a step's parts at a machine's rates, and an overhead."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from quire.layout.model import ModelSpec
from quire.plan.roofline import RowTokens, step_parts
from quire.sim.machine import Rates

_ATTENTION = "attention"
Counts = NDArray[np.int64]


class StepTimer:
    """Computes the duration of a model's steps at the rates of a machine.

    A step takes its overhead plus, part after part (projections, attention, MLP, head), the larger
    of bytes over the read rate and FLOPs over the product rate: `plan.roofline`, for whole batches.
    Attention over rows of one step is one part; a chunk's products may hide another row's reads.

    Args:
        model: shape of the model.
        rates: rates of the machine.
        bytes_per_value: bytes of an element of weights and KV.
    """

    def __init__(self, model: ModelSpec, rates: Rates, *, bytes_per_value: int = 2) -> None:
        self.model, self.rates, self.bytes_per_value = model, rates, bytes_per_value
        self._layers_by_window = Counter(layer.window for layer in model.layers)
        self._dense_s: dict[tuple[int, int], float] = {}

    def seconds(self, new: Counts, before: Counts, sampled_rows: int) -> float:
        """Time of a step.

        Args:
            new: [rows] tokens processed, each 1 or more.
            before: [rows] tokens whose KV is already computed.
            sampled_rows: number of rows that sample a token.
        """
        key = int(new.sum()), sampled_rows
        dense_s = self._dense_s.get(key)
        if dense_s is None:
            dense_s = self._dense_s[key] = self._dense_seconds(*key)
        return self.rates.overhead_s + dense_s + self._attention_seconds(new, before)

    def _dense_seconds(self, tokens: int, sampled_rows: int) -> float:
        """All parts whose cost depends on the number of tokens alone."""
        parts = step_parts(
            self.model,
            [RowTokens(new=tokens, before=0)],
            sampled_rows=sampled_rows,
            bytes_per_value=self.bytes_per_value,
        )
        rates = self.rates
        return sum(
            part.floor_s(rates.read_bytes_per_s, rates.flops_per_s)
            for part in parts
            if part.name != _ATTENTION
        )

    def _attention_seconds(self, new: Counts, before: Counts) -> float:
        slots = pairs = 0
        full = new * before + new * (new + 1) // 2
        for window, layers in self._layers_by_window.items():
            seen, visible = before + new, full
            if window is not None:
                seen = np.minimum(seen, window + new - 1)
                visible = full - _hidden(new, before, window)
            slots += layers * int((seen + new).sum())
            pairs += layers * int(visible.sum())
        model = self.model
        read = slots * model.kv_values_per_layer_token * self.bytes_per_value
        flops = 4 * pairs * model.num_heads * model.head_dim
        return max(read / self.rates.read_bytes_per_s, flops / self.rates.flops_per_s)


def _hidden(new: Counts, before: Counts, window: int) -> Counts:
    """Pairs of a new token and a token before it that has left its window, [rows]."""
    # tokens hidden from the first new token that has hidden tokens, and from the last new token
    first = np.maximum(before + 1, window + 1) - window
    last = before + new - window
    return np.where(last >= first, (last - first + 1) * (first + last) // 2, 0)
