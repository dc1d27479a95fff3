"""What one decode step must read, and how long that takes at a given read rate.

Decoding a token multiplies matrices by a few vectors: the time goes into reading the weights once
and every sequence's KV. Rates are arguments, to be measured on the machine at hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Bytes that one decode step of a batch reads.

    Attributes:
        batch: sequences, each getting one token.
        weights_read_bytes: read once for the whole batch.
        kv_read_bytes: keys and values of all sequences.
    """

    batch: int
    weights_read_bytes: int
    kv_read_bytes: int

    @property
    def read_bytes(self) -> int:
        """Weights and KV."""
        return self.weights_read_bytes + self.kv_read_bytes

    @property
    def kv_share(self) -> float:
        """Part of the reads that is KV, 0 to 1."""
        return self.kv_read_bytes / self.read_bytes

    def seconds(self, read_bytes_per_s: int | float) -> float:
        """Shortest time of the step at a memory's read rate.

        Raises:
            ConfigError: a rate of 0 or less.
        """
        if read_bytes_per_s <= 0:
            raise ConfigError(f"read_bytes_per_s={read_bytes_per_s}: expected a rate above 0")
        return self.read_bytes / read_bytes_per_s

    def tokens_per_s(self, read_bytes_per_s: int | float) -> float:
        """Most tokens per second, all sequences together."""
        return self.batch / self.seconds(read_bytes_per_s)


def decode_step(
    model: ModelSpec,
    *,
    batch: int,
    tokens: int,
    weight_bytes_per_value: int | float = 2,
    kv_bytes_per_value: int | float = 2,
) -> DecodeStep:
    """The reads of one decode step.

    Args:
        model: the shape.
        batch: sequences in the step.
        tokens: length of each; window layers read at most their window.
        weight_bytes_per_value: 2 for fp16 and bf16.
        kv_bytes_per_value: likewise for the KV.

    Raises:
        ConfigError: a batch below 1, or a negative length.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch}: expected 1 or more")
    return DecodeStep(
        batch=batch,
        weights_read_bytes=weights_read_bytes(model, batch, weight_bytes_per_value),
        kv_read_bytes=batch * model.kv_bytes(tokens, kv_bytes_per_value),
    )


def weights_read_bytes(model: ModelSpec, batch: int, bytes_per_value: int | float) -> int:
    """Weights a decode step of `batch` tokens reads.

    Tables that are only looked up are left out. Of the routed experts a step reads those that at
    least one token chose: with even routing E * (1 - (1 - k / E) ** batch) of E.
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
) -> int:
    """The smallest batch whose KV reads exceed the weight reads of a decode step.

    Below it a step costs the weights, shared by the batch; above it each sequence's KV, and a
    smaller KV makes the step faster almost in proportion.

    Args:
        model: the shape.
        tokens: length of each sequence.
        weight_bytes_per_value: 2 for fp16 and bf16.
        kv_bytes_per_value: likewise for the KV.

    Raises:
        ConfigError: `tokens` below 1.
    """
    if tokens < 1:
        raise ConfigError(f"tokens={tokens}: expected a sequence of 1 token or more")
    each_bytes = model.kv_bytes(tokens, kv_bytes_per_value)
    # with all weights read the answer is at hand; a mixture of experts may need fewer
    above = weights_read_bytes(model, 1 << 30, weight_bytes_per_value) // each_bytes + 1
    below = 0
    while above - below > 1:
        middle = (below + above) // 2
        if middle * each_bytes > weights_read_bytes(model, middle, weight_bytes_per_value):
            above = middle
        else:
            below = middle
    return above


# ---- parts ---------------------------------------------------------------------------------------

# Bytes and FLOPs of each part of a step, and the time they take at least.
#
# The parts are what a decoder is made of: the projections of queries, keys and values; attention;
# the output projection; the MLP; the head; and the rest. Bytes are what must come from memory or go
# there: weights once a step, the KV that is read and the KV that is written. Activations are left
# out: they can stay in the caches.


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
