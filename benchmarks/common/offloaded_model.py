"""Simulate a model with offloaded KV: random weights on a device, X and KV in host memory.

A layer is a KV projection, decode attention, an output projection and an MLP, with norms and
without RoPE. No engine runs: the bench times variants of a schedule that an engine does not offer
(see `offloaded_step`).

If host or device memory holds only n layers, later layers share their data: layer i uses that of
layer i mod n. A layer's KV is far larger than any cache, so sharing does not shorten copies.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.decode_batch import DecodeBatch
from benchmarks.common.host_bytes import ALIGNMENT_BYTES, HostBytes
from benchmarks.common.link_codecs import Coder, LinkCodecs, activations_pay, coders
from benchmarks.common.target import Target
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.models.device_memory import free_device_bytes

CHANGE = "lower --rows or --context"
_DEVICE_SHARE = 0.9  # fraction of free memory; the rest is scratch of products and attention
_STAGED_LAYERS = 3  # layers of plain KV: two slots, and an X ring or decoded codes
_EMBEDDED = 2  # X of the first layer, and X of the layer that is being computed


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one layer, each [inner, outer].

    Attributes:
        query, kv, out: attention projections; keys of all heads precede values of all heads.
        up, down: MLP projections; for a gated MLP, `up` computes gate and value.
        gated: whether the MLP is gated.
    """

    query: Tensor
    kv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    gated: bool

    @classmethod
    def random(cls, case: DecodeBatch, generator: torch.Generator) -> "Layer":
        """Random weights that preserve the magnitude of activations."""
        spec, device = case.spec, generator.device
        dtype: torch.dtype = getattr(torch, case.dtype)

        def draw(inner: int, outer: int) -> Tensor:
            numbers = torch.randn(inner, outer, generator=generator, device=device, dtype=dtype)
            return numbers.mul_(inner**-0.5)

        heads, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
        grown = spec.intermediate_size * (1 + spec.gated_mlp)
        return cls(
            query=draw(hidden, heads),
            kv=draw(hidden, case.kv_width),
            out=draw(heads, hidden),
            up=draw(hidden, grown),
            down=draw(spec.intermediate_size, hidden),
            gated=spec.gated_mlp,
        )

    def project(self, x: Float[Tensor, "token hidden"], into: Float[Tensor, "token width"]) -> None:
        """Compute keys and values from activations."""
        torch.mm(x, self.kv, out=into)

    def finish(
        self, hidden: Float[Tensor, "row hidden"], attended: Float[Tensor, "row head"]
    ) -> Float[Tensor, "row hidden"]:
        """Compute the layer after its attention: output projection and MLP."""
        hidden = hidden + attended @ self.out
        grown = normed(hidden) @ self.up
        if self.gated:
            gate, value = grown.chunk(2, dim=1)
            return hidden + (F.silu(gate) * value) @ self.down
        return hidden + F.relu(grown) @ self.down


def normed(hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
    """Normalized hidden states: the input of a layer's attention."""
    return F.layer_norm(hidden, hidden.shape[-1:])


def attend_rows(
    case: DecodeBatch,
    query: Float[Tensor, "row head"],
    kv: Float[Tensor, "token width"],
) -> Float[Tensor, "row head"]:
    """Attention of one query per row over the row's own tokens.

    Rows are stored one after the other, with equally many tokens.

    Args:
        case: batch with the head counts.
        query: queries of all heads.
        kv: keys of all heads followed by values of all heads, for each token.
    """
    spec, rows = case.spec, len(query)
    planes = kv.view(rows, -1, 2, spec.num_kv_heads, spec.head_dim)
    key, value = (planes[:, :, side].transpose(1, 2) for side in (0, 1))
    heads = query.view(rows, spec.num_heads, 1, spec.head_dim)
    out = attend_dense(heads, key, value, math=AttentionMath(spec.head_dim**-0.5), seen=None)
    return out.reshape(rows, -1)


@dataclass(frozen=True, slots=True, eq=False)
class PartialAttention:
    """Attention of one row over some of its tokens.

    Attributes:
        out: [kv_head, group, head_dim], float32.
        log_weight: log of the sum of attention weights, [kv_head, group, 1].
    """

    out: Tensor
    log_weight: Tensor

    def merged(self, other: "PartialAttention") -> Float[Tensor, "1 head"]:
        """Attention over the tokens of both, in float32."""
        total = torch.logaddexp(self.log_weight, other.log_weight)
        parts = [part.out * torch.exp(part.log_weight - total) for part in (self, other)]
        return (parts[0] + parts[1]).view(1, -1)

    def to(self, device: torch.device) -> "PartialAttention":
        """Copy to a device."""
        out, log_weight = (t.to(device, non_blocking=True) for t in (self.out, self.log_weight))
        return PartialAttention(out, log_weight)


def attend_part(
    case: DecodeBatch, query: Float[Tensor, "one head"], kv: Float[Tensor, "token width"]
) -> PartialAttention:
    """Attention of one row's query over some of its tokens, at least one."""
    spec = case.spec
    planes = kv.view(-1, 2, spec.num_kv_heads, spec.head_dim).float()
    key, value = (planes[:, side].transpose(0, 1) for side in (0, 1))
    heads = query.view(spec.num_kv_heads, -1, spec.head_dim).float()
    scores = heads @ key.transpose(1, 2) * spec.head_dim**-0.5
    out = torch.softmax(scores, dim=-1) @ value
    return PartialAttention(out, torch.logsumexp(scores, dim=-1, keepdim=True))


class OffloadedModel:
    """Host and device state of one batch.

    Args:
        case: the batch.
        target: the device.
        pool: host memory; earlier allocations from the pool are freed.
        link_codecs: codecs of X and KV in host memory.
        with_x: whether host memory holds activations; None: only if they are smaller than KV.

    Attributes:
        distinct: number of layers with data of their own.
        with_x: whether host memory also holds activations.
        layers: weights of the distinct layers.
        embedded: activations of the first layer on the device; None without `with_x`.
        begin: hidden states of the rows before the first layer.

    Raises:
        ConfigError: not even one layer fits.
    """

    def __init__(
        self,
        case: DecodeBatch,
        target: Target,
        pool: HostBytes,
        link_codecs: LinkCodecs | None = None,
        *,
        with_x: bool | None = None,
    ) -> None:
        self.case, self.target, self.link_codecs = case, target, link_codecs or LinkCodecs()
        pays = activations_pay(case, self.link_codecs)
        self.with_x = pays if with_x is None else with_x
        self.kv_coder, self.x_coder = coders(case, self.link_codecs)
        pool.clear()
        self.distinct = distinct_layers(case, target, pool, self.link_codecs, with_x=with_x)
        rows = (case.spec.num_layers, case.rows)
        self.new_kv = pool.take((*rows, case.kv_width), self._dtype)
        self.new_x = pool.take((*rows, case.spec.hidden_size), self._dtype)
        self._draw = torch.Generator(target.device)
        self._draw.manual_seed(0)
        self.begin = self._normal(case.rows)
        self.layers = [Layer.random(case, self._draw) for _ in range(self.distinct)]
        self._host = [self._stored(layer, pool) for layer in range(self.distinct)]
        self.embedded = self.activations(0) if self.with_x else None

    @property
    def _dtype(self) -> torch.dtype:
        return self.kv_coder.dtype

    def layer(self, number: int) -> Layer:
        """Weights of the numbered layer of the model."""
        return self.layers[number % self.distinct]

    def x(self, number: int) -> tuple[Tensor, ...]:
        """Planes of a layer's activations on the host; none if recompute does not pay."""
        return self._host[number % self.distinct][0]

    def kv(self, number: int) -> tuple[Tensor, ...]:
        """Planes of a layer's KV in host memory."""
        return self._host[number % self.distinct][1]

    def plain_kv(self, number: int) -> Float[Tensor, "token width"]:
        """A layer's KV on the device, for any link codec; every call recomputes it."""
        layer = number % self.distinct
        x = self.activations(layer)
        kv = torch.empty(len(x), self.case.kv_width, dtype=x.dtype, device=x.device)
        self.layers[layer].project(x, kv)
        return kv

    def off(self, hidden: Float[Tensor, "row hidden"]) -> float:
        """Relative distance between a step's hidden states and the expected hidden states."""
        expected = self.expected.float()
        return float((hidden.float() - expected).norm() / expected.norm())

    @cached_property
    def expected(self) -> Float[Tensor, "row hidden"]:
        """Final hidden states of every step, computed with all KV on the device."""
        hidden = self.begin
        with torch.inference_mode():
            for number in range(self.case.spec.num_layers):
                layer = self.layer(number)
                query = normed(hidden) @ layer.query
                hidden = layer.finish(hidden, attend_rows(self.case, query, self.plain_kv(number)))
        return hidden

    # ---- data ----------------------------------------------------------------------------------

    def _normal(self, count: int) -> Tensor:
        shape = (count, self.case.spec.hidden_size)
        return torch.randn(
            shape, generator=self._draw, device=self.target.device, dtype=self._dtype
        )

    def activations(self, layer: int) -> Tensor:
        """Random activations of a layer; every call returns equal values for the same layer."""
        self._draw.manual_seed(1 + layer)
        return self._normal(self.case.tokens)

    def _stored(self, layer: int, pool: HostBytes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        x = self.activations(layer)
        kv = torch.empty(len(x), self.case.kv_width, dtype=x.dtype, device=x.device)
        self.layers[layer].project(x, kv)
        stored_x = _put(self.x_coder, x, pool) if self.with_x else ()
        return stored_x, _put(self.kv_coder, kv, pool)


def _put(coder: Coder, numbers: Tensor, pool: HostBytes) -> tuple[Tensor, ...]:
    planes = tuple(pool.take(shape, dtype) for shape, dtype in coder.records(len(numbers)))
    coder.encode(numbers, planes)
    return planes


def layer_host_bytes(
    case: DecodeBatch, link_codecs: LinkCodecs, *, with_x: bool | None = None
) -> int:
    """Host bytes of a distinct layer's X and KV."""
    kv, x = coders(case, link_codecs)
    pays = activations_pay(case, link_codecs) if with_x is None else with_x
    planes = len(kv.records(1)) + len(x.records(1))
    return case.tokens * (kv.token_bytes + x.token_bytes * pays) + planes * ALIGNMENT_BYTES


def new_host_bytes(case: DecodeBatch) -> int:
    """Host bytes that a step stores: new tokens of all rows in all layers."""
    width = case.kv_width + case.spec.hidden_size
    return case.rows * width * case.value_bytes * case.spec.num_layers + 2 * ALIGNMENT_BYTES


def distinct_layers(
    case: DecodeBatch,
    target: Target,
    pool: HostBytes,
    link_codecs: LinkCodecs,
    *,
    with_x: bool | None = None,
) -> int:
    """Number of layers with data of their own, at most all layers.

    Raises:
        ConfigError: not even one layer fits on the host, or on the device.
    """
    layer_bytes = layer_host_bytes(case, link_codecs, with_x=with_x)
    new_bytes = new_host_bytes(case)
    on_host = (pool.num_bytes - new_bytes) // layer_bytes
    if on_host < 1:
        raise ConfigError(
            f"a layer of {case.label} needs {layer_bytes + new_bytes:,} B of host memory, but the "
            f"pool has {pool.num_bytes:,} B; raise --pinned, or {CHANGE}"
        )
    fixed_bytes = device_bytes(case)
    free_bytes = _DEVICE_SHARE * free_device_bytes(target.device) - fixed_bytes
    on_device = math.floor(free_bytes / case.layer_weight_bytes)
    if on_device < 1:
        target.require(
            math.ceil((fixed_bytes + case.layer_weight_bytes) / _DEVICE_SHARE), case.label, CHANGE
        )
    return min(case.spec.num_layers, on_host, max(1, on_device))


def device_bytes(case: DecodeBatch) -> int:
    """Device bytes in addition to weights: staging, and activations during computation."""
    kv = _STAGED_LAYERS * case.kv_width
    return case.tokens * (kv + _EMBEDDED * case.spec.hidden_size) * case.value_bytes
