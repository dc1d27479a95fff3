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

CHANGE = "ask for fewer --rows, or shorter --context"
_DEVICE_SHARE = 0.9  # of what is free; the rest is scratch of products and attention
_STAGED_LAYERS = 3  # of plain KV: two slots, and what a ring of X or codes take
_EMBEDDED = 2  # X of the first layer, and of the one that is being made


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights, [inner, outer] each.

    Attributes:
        query, kv, out: of attention; keys of all heads before values of all heads.
        up, down: of the MLP; `up` makes gate and value where it is gated.
        gated: whether it is.
    """

    query: Tensor
    kv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    gated: bool

    @classmethod
    def random(cls, case: DecodeBatch, generator: torch.Generator) -> "Layer":
        """Weights that keep the size of what goes through them."""
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
        """Keys and values of activations."""
        torch.mm(x, self.kv, out=into)

    def finish(
        self, hidden: Float[Tensor, "row hidden"], attended: Float[Tensor, "row head"]
    ) -> Float[Tensor, "row hidden"]:
        """The layer behind its attention."""
        hidden = hidden + attended @ self.out
        grown = normed(hidden) @ self.up
        if self.gated:
            gate, value = grown.chunk(2, dim=1)
            return hidden + (F.silu(gate) * value) @ self.down
        return hidden + F.relu(grown) @ self.down


def normed(hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
    """What a layer's attention is given."""
    return F.layer_norm(hidden, hidden.shape[-1:])


def attend_rows(
    case: DecodeBatch,
    query: Float[Tensor, "row head"],
    kv: Float[Tensor, "token width"],
) -> Float[Tensor, "row head"]:
    """One query a row over its own tokens, which lie row behind row, equally many of each.

    Args:
        case: heads.
        query: of all heads.
        kv: keys of all heads before values of all heads, token by token.
    """
    spec, rows = case.spec, len(query)
    planes = kv.view(rows, -1, 2, spec.num_kv_heads, spec.head_dim)
    key, value = (planes[:, :, side].transpose(1, 2) for side in (0, 1))
    heads = query.view(rows, spec.num_heads, 1, spec.head_dim)
    out = attend_dense(heads, key, value, math=AttentionMath(spec.head_dim**-0.5), seen=None)
    return out.reshape(rows, -1)


@dataclass(frozen=True, slots=True, eq=False)
class PartialAttention:
    """One row's attention over a part of its tokens.

    Attributes:
        out: [kv_head, group, head_dim], float32.
        log_weight: log of the sum of weights, [kv_head, group, 1].
    """

    out: Tensor
    log_weight: Tensor

    def merged(self, other: "PartialAttention") -> Float[Tensor, "1 head"]:
        """Attention over the tokens of both, in float32."""
        total = torch.logaddexp(self.log_weight, other.log_weight)
        parts = [part.out * torch.exp(part.log_weight - total) for part in (self, other)]
        return (parts[0] + parts[1]).view(1, -1)

    def to(self, device: torch.device) -> "PartialAttention":
        """The same on a device."""
        out, log_weight = (t.to(device, non_blocking=True) for t in (self.out, self.log_weight))
        return PartialAttention(out, log_weight)


def attend_part(
    case: DecodeBatch, query: Float[Tensor, "one head"], kv: Float[Tensor, "token width"]
) -> PartialAttention:
    """One row's query over some of its tokens, of which there is one or more."""
    spec = case.spec
    planes = kv.view(-1, 2, spec.num_kv_heads, spec.head_dim).float()
    key, value = (planes[:, side].transpose(0, 1) for side in (0, 1))
    heads = query.view(spec.num_kv_heads, -1, spec.head_dim).float()
    scores = heads @ key.transpose(1, 2) * spec.head_dim**-0.5
    out = torch.softmax(scores, dim=-1) @ value
    return PartialAttention(out, torch.logsumexp(scores, dim=-1, keepdim=True))


class OffloadedModel:
    """Host and device of one batch.

    Args:
        case: the batch.
        target: the device.
        pool: host memory; taken back from whoever had it.
        link_codecs: how X and KV lie on the host.
        with_x: whether activations lie there; None: where they are smaller than KV.

    Attributes:
        distinct: layers with numbers of their own.
        with_x: whether activations lie on the host too.
        layers: weights.
        embedded: activations of the first layer on the device, where `with_x`.
        begin: hidden states of the rows before the first layer.

    Raises:
        ConfigError: not one layer fits.
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
        self._host = [self._stored(place, pool) for place in range(self.distinct)]
        self.embedded = self.activations(0) if self.with_x else None

    @property
    def _dtype(self) -> torch.dtype:
        return self.kv_coder.dtype

    def layer(self, number: int) -> Layer:
        """Weights of a layer of the model."""
        return self.layers[number % self.distinct]

    def x(self, number: int) -> tuple[Tensor, ...]:
        """Planes of a layer's activations on the host; none if recompute does not pay."""
        return self._host[number % self.distinct][0]

    def kv(self, number: int) -> tuple[Tensor, ...]:
        """Planes of its KV on the host."""
        return self._host[number % self.distinct][1]

    def plain_kv(self, number: int) -> Float[Tensor, "token width"]:
        """A layer's KV on the device, for any link codec; computed again by every call."""
        place = number % self.distinct
        x = self.activations(place)
        kv = torch.empty(len(x), self.case.kv_width, dtype=x.dtype, device=x.device)
        self.layers[place].project(x, kv)
        return kv

    def off(self, hidden: Float[Tensor, "row hidden"]) -> float:
        """How far a step's hidden states are from the expected ones, relative."""
        expected = self.expected.float()
        return float((hidden.float() - expected).norm() / expected.norm())

    @cached_property
    def expected(self) -> Float[Tensor, "row hidden"]:
        """What every step ends with, computed with all KV on the device."""
        hidden = self.begin
        with torch.inference_mode():
            for number in range(self.case.spec.num_layers):
                layer = self.layer(number)
                query = normed(hidden) @ layer.query
                hidden = layer.finish(hidden, attend_rows(self.case, query, self.plain_kv(number)))
        return hidden

    # ---- numbers -------------------------------------------------------------------------------

    def _normal(self, count: int) -> Tensor:
        shape = (count, self.case.spec.hidden_size)
        return torch.randn(
            shape, generator=self._draw, device=self.target.device, dtype=self._dtype
        )

    def activations(self, place: int) -> Tensor:
        """Random numbers that are equal in every call for the same layer."""
        self._draw.manual_seed(1 + place)
        return self._normal(self.case.tokens)

    def _stored(self, place: int, pool: HostBytes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        x = self.activations(place)
        kv = torch.empty(len(x), self.case.kv_width, dtype=x.dtype, device=x.device)
        self.layers[place].project(x, kv)
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
    """Host bytes of what a step stores: the rows' new tokens, of all layers."""
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
    """Layers that get numbers of their own, at most all.

    Raises:
        ConfigError: not one fits on the host, or on the device.
    """
    layer_bytes = layer_host_bytes(case, link_codecs, with_x=with_x)
    new_bytes = new_host_bytes(case)
    on_host = (pool.num_bytes - new_bytes) // layer_bytes
    if on_host < 1:
        raise ConfigError(
            f"a layer of {case.label} needs {layer_bytes + new_bytes:,} B of host memory, the pool "
            f"has {pool.num_bytes:,} B; raise --pinned, or {CHANGE}"
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
    """Bytes on the device beside weights: staging, and activations as they are made."""
    kv = _STAGED_LAYERS * case.kv_width
    return case.tokens * (kv + _EMBEDDED * case.spec.hidden_size) * case.value_bytes
