"""Bytes and FLOPs of each part of a step, and the time they take at least.

The parts are what a decoder is made of: the projections of queries, keys and values; attention;
the output projection; the MLP; the head; and the rest. Bytes are what must come from memory or go
there: weights once a step, the KV that is read and the KV that is written. Activations are left
out: they can stay in the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.roofline import weights_read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """One sequence in a step.

    Attributes:
        new: tokens processed; 1 while decoding.
        before: tokens whose KV was there already.
    """

    new: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What one part of a step needs.

    Attributes:
        name: `qkv`, `attention`, `output projection`, `mlp`, `head`, `rest`; `total` of a sum.
        weight_bytes: read once.
        kv_bytes: read, and written for new tokens.
        flops: two for each multiply and add of a product.
    """

    name: str
    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        """All bytes from and to memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def floor_s(self, read_bytes_per_s: float, flops_per_s: float) -> float:
        """Shortest time: the larger of bytes over the read rate and FLOPs over the product rate.

        Raises:
            ConfigError: a rate of 0 or less.
        """
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
    """The cost of each part of one step.

    Args:
        model: the shape; a mixture of experts reads the experts that are chosen, see `roofline`.
        rows: the step's sequences.
        sampled_rows: rows the head is computed for.
        bytes_per_value: of weights and KV.

    Raises:
        ConfigError: no rows, or a row without a new token.
    """
    if not rows or min(row.new for row in rows) < 1:
        raise ConfigError("expected rows with 1 or more new tokens each")
    tokens = sum(row.new for row in rows)
    projected = model.num_layers * model.hidden_size * model.head_dim
    qkv = projected * (model.num_heads + 2 * model.num_kv_heads)
    output = projected * model.num_heads
    norms = (2 * model.num_layers + 1) * model.hidden_size
    head = model.embedding_parameters
    # what is left of the model is its MLPs, with the experts that take part
    others = qkv + output + head + norms
    mlp_bytes = weights_read_bytes(model, tokens, bytes_per_value) - others * bytes_per_value
    mlp_active = model.num_active_parameters - model.lookup_parameters - others
    kv_bytes, attention_flops = _attention(model, rows, bytes_per_value)
    looked_up = tokens * model.hidden_size * bytes_per_value
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


def _attention(
    model: ModelSpec, rows: Sequence[RowTokens], bytes_per_value: int
) -> tuple[int, int]:
    """KV bytes read and written, and the FLOPs of both products, over all layers."""
    slots = pairs = 0
    for layer in model.layers:
        for row in rows:
            pairs += _visible(row, layer.window)
            # every key that some query sees is read once; a new one is written before
            seen = row.before + row.new
            if layer.window is not None:
                seen = min(seen, layer.window + row.new - 1)
            slots += seen + row.new
    per_pair = 4 * model.num_heads * model.head_dim
    return slots * model.kv_values_per_layer_token * bytes_per_value, pairs * per_pair


def _visible(row: RowTokens, window: int | None) -> int:
    """Pairs of a new token and a token it sees, itself included."""
    full = row.new * row.before + row.new * (row.new + 1) // 2
    if window is None:
        return full
    first, last = row.before + 1, row.before + row.new  # seen by the first and the last, unbounded
    over = range(max(first, window + 1), last + 1)
    return full - sum(seen - window for seen in over)
