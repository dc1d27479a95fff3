"""A model whose KV is on the host: weights on a device, X and KV of every layer in pinned memory.

Layers that the host's or the device's memory has no room for share numbers with earlier ones: layer
i has those of layer i mod n. A layer's KV is far larger than any cache, so copies take as long.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.device.host_bytes import ALIGNMENT_BYTES, HostBytes
from benchmarks.device.link_codecs import Coder, LinkCodecs, activations_pay, coders
from benchmarks.device.random_layer import Layer, attend_rows, normed
from benchmarks.device.shapes import DecodeCase
from benchmarks.device.target import Target
from quire.errors import ConfigError
from quire.models.device_memory import free_device_bytes

CHANGE = "ask for fewer --rows, or shorter --context"
_DEVICE_SHARE = 0.9  # of what is free; the rest is scratch of products and attention
_STAGED_LAYERS = 3  # of plain KV: two slots, and what a ring of X or codes take
_EMBEDDED = 2  # X of the first layer, and of the one that is being made


class OffloadedModel:
    """Host and device of one batch.

    Args:
        case: the batch.
        target: the device.
        pool: host memory; taken back from whoever had it.
        link_codecs: how X and KV lie on the host.

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
        case: DecodeCase,
        target: Target,
        pool: HostBytes,
        link_codecs: LinkCodecs | None = None,
    ) -> None:
        self.case, self.target, self.link_codecs = case, target, link_codecs or LinkCodecs()
        self.with_x = activations_pay(case, self.link_codecs)
        self.kv_coder, self.x_coder = coders(case, self.link_codecs)
        pool.clear()
        self.distinct = distinct_layers(case, target, pool, self.link_codecs)
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
        """Planes of a layer's activations on the host; none where they do not pay."""
        return self._host[number % self.distinct][0]

    def kv(self, number: int) -> tuple[Tensor, ...]:
        """Planes of its KV on the host."""
        return self._host[number % self.distinct][1]

    def plain_kv(self, number: int) -> Float[Tensor, "token width"]:
        """A layer's KV on the device, whatever it is coded in: made once more."""
        place = number % self.distinct
        x = self.activations(place)
        kv = torch.empty(len(x), self.case.kv_width, dtype=x.dtype, device=x.device)
        self.layers[place].project(x, kv)
        return kv

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
        """The same for the same layer, whenever they are asked for."""
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


def distinct_layers(
    case: DecodeCase, target: Target, pool: HostBytes, link_codecs: LinkCodecs
) -> int:
    """Layers that get numbers of their own, at most all.

    Raises:
        ConfigError: not one fits on the host, or on the device.
    """
    kv, x = coders(case, link_codecs)
    token_bytes = kv.token_bytes + x.token_bytes * activations_pay(case, link_codecs)
    planes = len(kv.records(1)) + len(x.records(1))
    layer_bytes = case.tokens * token_bytes + planes * ALIGNMENT_BYTES
    width = case.kv_width + case.spec.hidden_size
    new_bytes = case.rows * width * case.value_bytes * case.spec.num_layers + 2 * ALIGNMENT_BYTES
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


def device_bytes(case: DecodeCase) -> int:
    """Bytes on the device beside weights: staging, and activations as they are made."""
    kv = _STAGED_LAYERS * case.kv_width
    return case.tokens * (kv + _EMBEDDED * case.spec.hidden_size) * case.value_bytes
