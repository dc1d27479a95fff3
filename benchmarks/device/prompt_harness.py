"""Reading a prompt chunk by chunk on a device, with random weights and KV in one piece a layer."""

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.device.host_bytes import HostBytes
from benchmarks.device.random_layer import Layer, normed
from benchmarks.device.shapes import DecodeCase
from benchmarks.device.target import Target
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense

_CHANGE = "name shorter prompts, or leave the part swap out"


class PromptHarness:
    """One sequence on a device, and a copy of its KV on the host.

    Tokens of a chunk see the whole chunk: half a chunk's products of attention too many, and the
    same kernel whatever is ahead.

    Args:
        case: one row; its context is the longest prompt.
        chunk_tokens: that a call reads.
        target: the device.
        pool: host memory; taken back from whoever had it.

    Attributes:
        kv: on the device, [layer, token, width].
        host: its copy.

    Raises:
        ConfigError: device or pool has no room.
    """

    def __init__(
        self, case: DecodeCase, chunk_tokens: int, target: Target, pool: HostBytes
    ) -> None:
        self.case, self.chunk_tokens = case, chunk_tokens
        spec, dtype = case.spec, getattr(torch, case.dtype)
        weight_bytes = spec.num_layers * case.layer_weight_bytes
        target.require(weight_bytes + case.kv_bytes, f"a prompt of {case.context:,}", _CHANGE)
        draw = torch.Generator(target.device)
        draw.manual_seed(0)
        self._layers = [Layer.random(case, draw) for _ in range(spec.num_layers)]
        shape = (spec.num_layers, case.context, case.kv_width)
        self.kv = torch.zeros(shape, dtype=dtype, device=target.device)
        pool.clear()
        self.host = pool.take(shape, dtype)
        self._embedded = torch.randn(
            chunk_tokens, spec.hidden_size, generator=draw, device=target.device, dtype=dtype
        )

    def read(self, first: int, count: int) -> None:
        """One chunk through all layers; its KV is in its place behind it."""
        with torch.inference_mode():
            hidden = self._embedded[:count]
            for kv, layer in zip(self.kv, self._layers, strict=True):
                given = normed(hidden)
                layer.project(given, kv[first : first + count])
                out = self._attend(given @ layer.query, kv[: first + count])
                hidden = layer.finish(hidden, out)

    def read_all(self, tokens: int) -> None:
        """A prompt from its beginning."""
        for first in range(0, tokens, self.chunk_tokens):
            self.read(first, min(self.chunk_tokens, tokens - first))

    def save(self, tokens: int) -> None:
        """Begin to copy its KV to the host, layer by layer."""
        for kv, host in zip(self.kv, self.host, strict=True):
            host[:tokens].copy_(kv[:tokens], non_blocking=True)

    def load(self, first: int, count: int) -> None:
        """Begin to copy some tokens' KV back."""
        for kv, host in zip(self.kv, self.host, strict=True):
            kv[first : first + count].copy_(host[first : first + count], non_blocking=True)

    def off(self, tokens: int) -> float:
        """How far the device's KV is from the host's, relative."""
        kv, host = self.kv[:, :tokens], self.host[:, :tokens].to(self.kv.device)
        return float((kv - host).float().norm() / host.float().norm())

    def _attend(
        self, query: Float[Tensor, "token head"], kv: Float[Tensor, "seen width"]
    ) -> Float[Tensor, "token head"]:
        spec, count = self.case.spec, len(query)
        planes = kv.view(1, -1, 2, spec.num_kv_heads, spec.head_dim)
        key, value = (planes[:, :, side].transpose(1, 2) for side in (0, 1))
        heads = query.view(1, count, spec.num_heads, spec.head_dim).transpose(1, 2)
        out = attend_dense(heads, key, value, math=AttentionMath(spec.head_dim**-0.5), seen=None)
        return out.transpose(1, 2).reshape(count, -1)
