"""The native decoder: a Llama-like model whose layers are one chain of calls of the C library.

Before attention: RMSNorm, one product for queries, keys and values, RoPE. After attention: the
output projection added to the residual stream, RMSNorm, one gated product, and the down projection
added to the residual stream. The residual stream is float32; Transformers rounds it to the model's
type after every operation. Buffers are allocated once for the largest batch.

Python runs between the layers only if attention needs more than the C library computes, such as
statistics of tokens or offloaded pages.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.kernels.backend import AttentionMath
from quire.kernels.native.chain import PartTimes
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear import Products
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall, Batch, ChainedAttention
from quire.models.hidden_states import note_hidden_states
from quire.models.native.layers import FusedModel, fuse, refusal
from quire.models.native.rope_table import RopeTable
from quire.models.native.workspace import LayerCalls, Workspace


class NativeDecoder(TransformersDecoder):
    """A decoder with fused layers; equal to `TransformersDecoder` up to rounding.

    Args:
        model: a causal language model in float32 or bfloat16 on the CPU; it is changed permanently.
        library: the loaded C library.
        kind: of the linear layers' weights: int8 or int4; None: as they are.

    Raises:
        UnsupportedModel: the model cannot be fused; states the reason.
    """

    def __init__(
        self, model: PreTrainedModel, library: NativeLibrary, kind: str | None = None
    ) -> None:
        reason = refusal(model)
        if reason is not None:
            raise UnsupportedModel(f"{reason}; load it with model_impl=transformers")
        products = Products(library)
        self._fused: FusedModel = fuse(model, products, kind)
        self._workspace = Workspace(self._fused, library, products, model.dtype)
        self._math = [AttentionMath(layer.scale) for layer in self._fused.layers]
        self._rope_table = RopeTable(self._fused.rotary)
        super().__init__(model)

    def prepare(self, statistic: Statistic) -> str | None:
        """See `Decoder.prepare`; the residual stream after attention is always at hand."""
        return None if isinstance(statistic, ResidualSimilarity) else super().prepare(statistic)

    def prepare_hidden_states(self) -> str | None:
        """See `HiddenStates`; the residual stream is always at hand."""
        return None

    def time_parts(self) -> PartTimes:
        """Time the C calls of all following forwards by component; return the times."""
        return self._workspace.time_parts()

    @torch.inference_mode()
    def _logits(self, batch: Batch) -> Tensor:
        workspace, rows = self._workspace, batch.token_ids.shape[0]
        if rows == 0:
            return torch.empty(0, self._fused.head.weight.outer)
        workspace.set_rows(rows)
        workspace.stream.copy_(self._fused.embedding(batch.token_ids))
        workspace.set_turns(*self._rope_table.at(batch.positions))
        self._run_layers(batch.attention)
        note_hidden_states(batch.attention, workspace.normed_rows)
        return workspace.logits(batch.sample_rows)

    def _run_layers(self, attention: Any) -> None:
        workspace = self._workspace
        chained = None
        if isinstance(attention, ChainedAttention):
            chained = attention.chain(self._math, workspace.heads)
        if chained is not None:
            workspace.run_layers(chained)
            return
        for number, layer in enumerate(workspace.layers):
            self._run_layer(number, layer, attention)

    def _run_layer(self, number: int, layer: LayerCalls, attention: Any) -> None:
        workspace = self._workspace
        query, key, value = workspace.run_before(layer)
        if getattr(attention, "wants_inputs", False):
            attention.note_input(number, workspace.normed.to(self.dtype, copy=True))
        call = AttentionCall(
            layer=number,
            scale=layer.scale,
            window=self.spec.layers[number].window,
            softcap=None,
            sinks=None,
            rotary=self._bridge.rotaries.get(number),
        )
        attended = attention.attend(call, query, key, value).contiguous()
        if not getattr(attention, "wants_residual_similarity", False):
            workspace.run_after(layer, attended)
            return
        before = workspace.stream.clone()
        workspace.run_output(layer, attended)
        similarity = F.cosine_similarity(before, workspace.stream, dim=-1)
        attention.note_residual_similarity(number, similarity)
        workspace.run_mlp(layer)
