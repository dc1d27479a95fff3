"""Weights on the link too: batch after batch through all layers, or layer by layer for all batches.

    row by row         every batch loads every layer:      w = W
    column by column   n batches share a loaded layer:     w = W / n

With w on the link of each batch the pipelined split holds as it stands, so weights that are loaded
raise it: the link has more to carry, and the device more time to recompute. Column by column needs
the KV of n batches on the host and hidden states between layers, row by row neither.
"""

from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_seconds, pipelined_split

Order = Literal["row", "column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Seconds of a layer's weights on the link, by what waits for them.

    Attributes:
        kv_s: of W_K and W_V, which recomputing needs.
        qo_s: of W_Q and W_O.
        mlp_s: of the MLP.
    """

    kv_s: int | float
    qo_s: int | float
    mlp_s: int | float

    @property
    def total_s(self) -> int | float:
        """W: of the whole layer."""
        return self.kv_s + self.qo_s + self.mlp_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One way to run batches through a model.

    Attributes:
        order: of batches and layers.
        batches: that share a loaded layer.
        rows: of each batch.
        x_tokens: recomputed of each batch.
        tokens_per_s: generated, all batches, in the steady state.
    """

    order: Order
    batches: int
    rows: int
    x_tokens: int
    tokens_per_s: float


def with_weights(rates: OffloadRates, weights_s: int | float, batches: int = 1) -> OffloadRates:
    """Rates of a batch that pays its part of a layer's weights.

    Raises:
        ConfigError: no batch.
    """
    if batches < 1:
        raise ConfigError(f"expected 1 batch or more, got {batches}")
    return replace(rates, link_s=rates.link_s + weights_s / batches)


def run_pass(
    rates: OffloadRates,
    *,
    order: Order,
    weights_s: int | float,
    batches: int,
    rows: int,
    tokens: int,
    num_layers: int,
) -> Pass:
    """The best split of one way, and what it generates.

    Args:
        rates: of one batch, without weights.
        order: by row every batch loads the weights itself.
        weights_s: of a layer on the link; 0 where they are on the device.
        batches: how many.
        rows: of each batch.
        tokens: of all rows of a batch.
        num_layers: of the model.
    """
    shared = batches if order == "column" else 1
    loaded = with_weights(rates, weights_s, shared)
    split = pipelined_split(loaded, tokens)
    layer_s = pipelined_seconds(loaded, tokens, split)
    return Pass(
        order=order,
        batches=shared,
        rows=rows,
        x_tokens=split,
        tokens_per_s=rows / (num_layers * layer_s),
    )


def faster_pass(*passes: Pass) -> Pass:
    """The way that generates most; of equal ones the first."""
    return max(passes, key=lambda found: found.tokens_per_s)
