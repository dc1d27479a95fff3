"""What one decode step must read, and how long that takes at a given read rate.

Decoding a token multiplies matrices by a few vectors: the time goes into reading the weights once
and every sequence's KV. Rates are arguments, to be measured on the machine at hand.
"""

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
