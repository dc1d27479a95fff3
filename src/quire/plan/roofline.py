"""Memory reads of a decode step, and its least time at a read rate.

Decoding a token multiplies matrices by a few vectors. So the time is spent reading the weights once
and the KV of every sequence. Rates are arguments, to be measured on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.layout.model import ModelSpec

if TYPE_CHECKING:  # planning starts without NumPy
    from quire.layout.model import Counts

STATE_VALUE_BYTES = 4  # recurrent states are stored in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Bytes that one decode step of a batch reads.

    Attributes:
        batch: number of sequences; each gets one token.
        weights_read_bytes: read once for the whole batch.
        kv_read_bytes: keys, values and recurrent states of all sequences.
    """

    batch: int
    weights_read_bytes: int
    kv_read_bytes: int

    @property
    def read_bytes(self) -> int:
        return self.weights_read_bytes + self.kv_read_bytes

    @property
    def kv_share(self) -> float:
        """Fraction (0 to 1) of the reads that is KV."""
        return self.kv_read_bytes / self.read_bytes

    def seconds(self, read_bytes_per_s: int | float) -> float:
        """Shortest time of the step at a memory's read rate."""
        if read_bytes_per_s <= 0:
            raise ConfigError(f"read_bytes_per_s={read_bytes_per_s}: expected a rate above 0")
        return self.read_bytes / read_bytes_per_s

    def tokens_per_s(self, read_bytes_per_s: int | float) -> float:
        """Most tokens per second of all sequences together."""
        return self.batch / self.seconds(read_bytes_per_s)


def decode_step(
    model: ModelSpec,
    *,
    batch: int,
    tokens: int,
    weight_bytes_per_value: int | float = 2,
    kv_bytes_per_value: int | float = 2,
    state_bytes: int | None = None,
) -> DecodeStep:
    """Compute the reads of one decode step.

    `state_bytes` are those of one sequence's recurrent states; None: in float32.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch}: expected 1 or more")
    return DecodeStep(
        batch=batch,
        weights_read_bytes=weights_read_bytes(model, batch, weight_bytes_per_value),
        kv_read_bytes=batch * _kv_read_bytes(model, tokens, kv_bytes_per_value, state_bytes),
    )


def _kv_read_bytes(
    model: ModelSpec, tokens: int, bytes_per_value: int | float, state_bytes: int | None
) -> int:
    """Bytes of a sequence's keys, values and states that a decode step reads."""
    kv_bytes = model.kv_bytes(tokens, bytes_per_value, read_in_step=True)
    if state_bytes is None:
        state_bytes = STATE_VALUE_BYTES * model.state_values
    return kv_bytes + state_bytes


def weights_read_bytes(model: ModelSpec, batch: int, bytes_per_value: int | float) -> int:
    """Bytes of weights that a decode step of `batch` tokens reads.

    Lookup tables are excluded. Of the E routed experts a step reads those selected by at least one
    token: E * (1 - (1 - k / E) ** batch) with even routing to k experts per token.
    """
    values = float(model.num_parameters - model.lookup_parameters)
    if model.mixture is not None:
        experts, chosen = model.mixture.num_experts, model.mixture.experts_per_token
        idle = model.num_parameters - model.num_active_parameters
        per_expert = idle / (experts - chosen) if experts > chosen else 0.0
        values -= per_expert * experts * (1 - chosen / experts) ** batch
    return round(values * bytes_per_value)


def crossover_batch(
    model: ModelSpec,
    *,
    tokens: int,
    weight_bytes_per_value: int | float = 2,
    kv_bytes_per_value: int | float = 2,
    state_bytes: int | None = None,
) -> int:
    """The smallest batch whose KV reads exceed the weight reads of a decode step.

    Below it the weights dominate, which the batch shares. Above it the KV of each sequence
    dominates, and a smaller KV makes the step faster almost in proportion. `state_bytes` as in
    `decode_step`.
    """
    if tokens < 1:
        raise ConfigError(f"tokens={tokens}: expected a sequence of 1 token or more")
    each_bytes = _kv_read_bytes(model, tokens, kv_bytes_per_value, state_bytes)
    # upper bound: all weights are read; a mixture of experts may need fewer sequences
    above = weights_read_bytes(model, 1 << 30, weight_bytes_per_value) // each_bytes + 1
    below = 0
    while above - below > 1:
        middle = (below + above) // 2
        if middle * each_bytes > weights_read_bytes(model, middle, weight_bytes_per_value):
            above = middle
        else:
            below = middle
    return above


# Bytes and FLOPs of each component of a step, and their least time.
#
# Components: the projections of queries, keys and values; attention; the output projection; the
# MLP; the head; and the rest. Bytes are memory traffic: weights once a step, KV read and KV
# written. Activations are excluded: they can stay in the caches.


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """One sequence of a step."""

    new: int  # 1 while decoding
    before: int  # tokens with stored KV


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """Cost of one component of a step.

    Attributes:
        name: `qkv`, `attention`, `output projection`, `mlp`, `head`, `rest`; `total` of a sum.
        weight_bytes: read once.
        kv_bytes: read, and written for new tokens.
        flops: two for each multiply-add of a product.
    """

    name: str
    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def floor_s(self, read_bytes_per_s: float, flops_per_s: float) -> float:
        """Shortest time: the larger of bytes over the read rate and FLOPs over the product rate."""
        if min(read_bytes_per_s, flops_per_s) <= 0:
            raise ConfigError(
                f"expected rates above 0, got {read_bytes_per_s} B/s, {flops_per_s} FLOP/s"
            )
        return max(self.num_bytes / read_bytes_per_s, self.flops / flops_per_s)


def step_parts(
    model: ModelSpec,
    rows: Sequence[RowTokens],
    *,
    sampled_rows: int,
    bytes_per_value: int = 2,
) -> tuple[PartCost, ...]:
    """Compute the cost of each component of one step."""
    if not rows or min(row.new for row in rows) < 1:
        raise ConfigError("expected rows with 1 or more new tokens each")
    tokens = sum(row.new for row in rows)
    qkv, output = model.projections
    norms = (2 * model.num_layers + 1) * model.hidden_size
    head = model.embedding_parameters
    # the rest of the model: its MLPs, with the selected experts
    others = qkv + output + head + norms
    mlp_bytes = weights_read_bytes(model, tokens, bytes_per_value) - others * bytes_per_value
    mlp_active = model.num_active_parameters - model.lookup_parameters - others
    import numpy as np

    new, before = (np.array([getattr(row, name) for row in rows]) for name in ("new", "before"))
    kv_bytes, attention_flops = attention_cost(model, new, before, bytes_per_value)
    row = model.hidden_size + model.num_layers * model.extra.layer_width
    looked_up = tokens * row * bytes_per_value
    return (
        _product("qkv", qkv, tokens, bytes_per_value),
        PartCost(name="attention", weight_bytes=0, kv_bytes=kv_bytes, flops=attention_flops),
        _product("output projection", output, tokens, bytes_per_value),
        PartCost(name="mlp", weight_bytes=mlp_bytes, kv_bytes=0, flops=2 * tokens * mlp_active),
        _product("head", head if sampled_rows else 0, sampled_rows, bytes_per_value),
        PartCost(
            name="rest", weight_bytes=norms * bytes_per_value + looked_up, kv_bytes=0, flops=0
        ),
    )


def _product(name: str, weights: int, tokens: int, bytes_per_value: int) -> PartCost:
    return PartCost(
        name=name,
        weight_bytes=weights * bytes_per_value,
        kv_bytes=0,
        flops=2 * tokens * weights,
    )


def attention_cost(
    model: ModelSpec, new: "Counts", before: "Counts", bytes_per_value: int
) -> tuple[int, int]:
    """KV bytes read and written, and the FLOPs of both products, over all layers and sequences.

    Every key that a query attends to is read once; a new one is also written, except by layers that
    read the KV of other layers. Recurrent states are read and written; FLOPs of scans are not
    counted.

    Args:
        model: layers and heads.
        new: [rows] tokens of each sequence in the step.
        before: [rows] tokens with stored KV.
        bytes_per_value: of an element of KV.
    """
    kv_bytes, flops = 2 * len(new) * STATE_VALUE_BYTES * model.state_values, 0
    for layer, heads, layers in model.attention:
        attended, values = layer, heads.values_per_token
        if heads.index is not None:  # index keys of all tokens, latents of the selected ones
            attended, index = replace(layer, window=heads.index.topk), heads.index
            keys, pairs = before + 2 * new, layer.pairs_in_step(new, before)
            kv_bytes += layers * int(keys.sum()) * index.dim * bytes_per_value
            flops += 2 * layers * int(pairs.sum()) * index.heads * index.dim
            values -= index.dim
        slots = attended.seen_in_step(new, before) + (new if layer.source is None else 0)
        kv_bytes += layers * int(slots.sum()) * values * bytes_per_value
        pairs = attended.pairs_in_step(new, before)
        flops += 2 * layers * int(heads.products_in_step(pairs, new, before).sum())
    return kv_bytes, flops
