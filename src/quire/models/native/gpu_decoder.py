"""The native decoder on a GPU: a Llama-like model with few kernels in each layer.

    RMSNorm + residual sum | product q,k,v | RoPE + page write | attention | product o |
    RMSNorm + residual sum | product gate, up | silu(gate) * up | product down

Products are those of PyTorch, all else are Triton's kernels. Numbers are rounded where Transformers
rounds them, except that RoPE is computed in float32.
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.kernels.backend import CosSin
from quire.kernels.triton import launch
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.models.adapter import TransformersDecoder, in_turn
from quire.models.base import AttentionCall, Batch
from quire.models.hidden_states import note_hidden_states
from quire.models.native.layers import GpuLayer, GpuModel, gpu_refusal, join


class GpuDecoder(TransformersDecoder):
    """A decoder with fused layers; equal to `TransformersDecoder` up to rounding.

    Args:
        model: a causal language model on its final device; it is changed permanently. Its
            parameters are views of the joint weights, which `model.to` and a replaced parameter
            would separate from them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        reason = gpu_refusal(model)
        if reason is not None:
            raise UnsupportedModel(f"{reason}; load it with model_impl=transformers")
        self._fused: GpuModel = join(model)
        super().__init__(model)

    def prepare(self, statistic: Statistic) -> str | None:
        return None if isinstance(statistic, ResidualSimilarity) else super().prepare(statistic)

    def prepare_hidden_states(self) -> str | None:
        return None

    def prepare_by_layer(self) -> str | None:
        return None

    @torch.inference_mode()
    def _logits(self, batch: Batch) -> Tensor:
        return in_turn([self._by_layer(batch)])[0]

    @torch.inference_mode()
    def _together(self, batches: Sequence[Batch]) -> list[Tensor]:
        return in_turn([self._by_layer(batch) for batch in batches])

    def _by_layer(self, batch: Batch) -> Generator[None, None, Tensor]:
        fused = self._fused
        attention: Any = batch.attention
        if not len(batch.token_ids):
            head = fused.head.weight
            return torch.empty(0, len(head), dtype=self.dtype, device=self.device)
        like = torch.empty(1, dtype=torch.float32, device=batch.positions.device)
        cosine, sine = self._fused.rotary(like, batch.positions[None])
        rope = CosSin(cosine[0].contiguous(), sine[0].contiguous())
        stream: Tensor = fused.embedding(batch.token_ids)
        first = fused.layers[0].attention_norm
        normed = launch.normed(stream, None, first.weight, first.eps)
        following = [layer.attention_norm for layer in fused.layers[1:]] + [fused.norm]
        for number, layer in enumerate(fused.layers):
            yield
            added = self._attention(number, layer, normed, rope, attention)
            before = stream.clone() if _wants(attention, "wants_residual_similarity") else None
            normed = launch.normed(stream, added, layer.mlp_norm.weight, layer.mlp_norm.eps)
            if before is not None:
                similarity = F.cosine_similarity(before.float(), stream.float(), dim=-1)
                attention.note_residual_similarity(number, similarity)
            added = layer.down(launch.gated(layer.gate_up(normed)))
            norm = following[number]
            normed = launch.normed(stream, added, norm.weight, norm.eps)
        note_hidden_states(attention, normed.__getitem__)
        return fused.head(normed[batch.sample_rows])

    def _attention(
        self, number: int, layer: GpuLayer, normed: Tensor, rope: CosSin, attention: Any
    ) -> Tensor:
        """Output of a layer's attention, to be added to the residual stream."""
        if _wants(attention, "wants_inputs"):
            attention.note_input(number, normed)
        rows, (num_heads, kv_heads) = len(normed), layer.heads
        joint = layer.qkv(normed)
        if layer.head_norms is not None:
            ours, theirs = layer.head_norms
            weights = ours.weight, theirs.weight
            launch.norm_query_and_key(joint, layer.heads, weights, ours.eps)
        heads = joint.view(rows, num_heads + 2 * kv_heads, layer.head_dim)
        query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
        takes_rope = _wants(attention, "takes_rope")
        if not takes_rope:
            launch.rotate(query, key, rope)
        call = AttentionCall(
            layer=number,
            scale=layer.scale,
            window=self.spec.layers[number].window,
            softcap=None,
            sinks=None,
            rotary=self._bridge.rotaries.get(number),
            rope=rope if takes_rope else None,
        )
        attended: Tensor = attention.attend(call, query, key, value)
        return layer.output(attended.reshape(rows, num_heads * layer.head_dim))


def _wants(attention: object, name: str) -> bool:
    return bool(getattr(attention, name, False))
