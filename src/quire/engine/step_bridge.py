"""Connection of a decoder's layers and the attention of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMath, HeadBuffers
from quire.kv.step import StepAttention
from quire.models.base import AttentionCall


class StepBridge:
    """Adapter between a decoder's layers and the attention of a step.

    Args:
        step: attention of the step.
        hidden_rows: rows of the batch whose hidden states are needed; None: none.
    """

    takes_rope = True

    def __init__(self, step: StepAttention, hidden_rows: Tensor | None = None) -> None:
        self._step = step
        self.hidden_rows = hidden_rows
        self.hidden_states = torch.empty(0)

    def note_hidden_states(self, states: Tensor) -> None:
        self.hidden_states = states

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        math = AttentionMath(call.scale, call.softcap, call.sinks)
        return self._step.attend(call.layer, math, query, key, value, call.rotary, call.rope)

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> list[object] | None:
        return self._step.chain(layers, heads)

    @property
    def wants_residual_similarity(self) -> bool:
        """Whether any row records the residual cosine similarity of attention."""
        return self._step.wants_residual_similarity

    def begin_layer(self, layer: int) -> None:
        self._step.begin_layer(layer)

    @property
    def wants_inputs(self) -> bool:
        return self._step.wants_inputs

    def note_input(self, layer: int, inputs: Tensor) -> None:
        self._step.note_input(layer, inputs)

    def note_residual_similarity(self, layer: int, cosines: Tensor) -> None:
        self._step.note_residual_similarity(layer, cosines)
