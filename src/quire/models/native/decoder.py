"""The native decoder: a Llama-like model whose layers are a few calls of the C library.

Per layer: RMSNorm, one product for queries, keys and values, RoPE, attention, the output
projection added to the residual stream, RMSNorm, one gated product, and the down projection added
to the residual stream. The residual stream is float32; Transformers rounds it to the model's type
after every operation. Buffers are allocated once for the largest batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear import Products
from quire.kernels.native.row_functions import RowFunctions
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall, Batch
from quire.models.native.layers import FusedLayer, FusedModel, Norm, fuse, refusal


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
        self._rows = RowFunctions(library)
        self._fused: FusedModel = fuse(model, products, kind)
        self._input_dtype = products.activation_dtype(self._fused.head.weight, model.dtype)
        self._buffers: dict[str, Tensor] = {}
        super().__init__(model)

    def prepare(self, statistic: Statistic) -> str | None:
        """See `Decoder.prepare`; the residual stream after attention is always at hand."""
        return None if isinstance(statistic, ResidualSimilarity) else super().prepare(statistic)

    @torch.inference_mode()
    def _logits(self, batch: Batch) -> Tensor:
        num_tokens = len(batch.token_ids)
        stream = self._buffer("stream", num_tokens, self.spec.hidden_size, torch.float32)
        stream.copy_(self._fused.embedding(batch.token_ids))
        turns = self._fused.rotary(stream[None], batch.positions[None])
        cosine, sine = (turn[0].contiguous() for turn in turns)
        for number, layer in enumerate(self._fused.layers):
            self._attend(number, layer, stream, cosine, sine, batch)
            self._mlp(layer, stream)
        return self._head(stream, batch.sample_rows)

    def _attend(
        self,
        number: int,
        layer: FusedLayer,
        stream: Tensor,
        cosine: Tensor,
        sine: Tensor,
        batch: Batch,
    ) -> None:
        """Add a layer's attention to the residual stream."""
        attention: Any = batch.attention
        normed = self._normed(stream, layer.attention_norm)
        if getattr(attention, "wants_inputs", False):
            attention.note_input(number, normed.to(self.dtype, copy=True))
        joint = self._buffer("qkv", len(stream), layer.qkv.weight.outer, torch.float32)
        layer.qkv.run(normed, joint)
        query, key, value = self._rows.split_heads(joint, layer.heads, cosine, sine, self.dtype)
        call = AttentionCall(
            layer=number,
            scale=layer.scale,
            window=self.spec.layers[number].window,
            softcap=None,
            sinks=None,
            rotary=self._bridge.rotaries.get(number),
        )
        attended = attention.attend(call, query, key, value).reshape(len(stream), -1)
        before = stream.clone() if getattr(attention, "wants_residual_similarity", False) else None
        layer.output.run(attended.to(self._input_dtype), stream)
        if before is not None:
            similarity = F.cosine_similarity(before, stream, dim=-1)
            attention.note_residual_similarity(number, similarity)

    def _mlp(self, layer: FusedLayer, stream: Tensor) -> None:
        """Add a layer's MLP to the residual stream."""
        normed = self._normed(stream, layer.mlp_norm)
        width = layer.gate_up.weight.outer // 2
        gated = self._buffer("gated", len(stream), width, self._input_dtype)
        layer.gate_up.run(normed, gated)
        layer.down.run(gated, stream)

    def _head(self, stream: Tensor, sample_rows: Tensor) -> Tensor:
        sampled = stream[sample_rows]
        normed = self._normed(sampled, self._fused.norm)
        logits = torch.empty(len(sampled), self._fused.head.weight.outer)
        self._fused.head.run(normed, logits)
        return logits

    def _normed(self, stream: Tensor, norm: Norm) -> Tensor:
        out = self._buffer("normed", len(stream), stream.shape[1], self._input_dtype)
        self._rows.norm(stream, norm.weight, norm.eps, out)
        return out

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for [rows, width], reused by later calls."""
        found = self._buffers.get(name)
        if found is None or len(found) < rows or found.shape[1] != width:
            found = self._buffers[name] = torch.empty(rows, width, dtype=dtype)
        return found[:rows]
