"""What a step has to do: tokens by where their KV is, bytes of what moves, speeds of who moves it.

| recomputed from X | carried as KV | on the device | attended to on the host |
  x                   kv              resident        host
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.errors import ConfigError
from quire.plan.offload.rates import OffloadRates
from quire.plan.rates import CopyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Tokens of one batch in one layer, all rows together.

    What a layer keeps is the union of what its lanes keep: a token's KV is made for all of them.

    Attributes:
        rows: that decode, one new token each.
        x: recomputed.
        kv: carried.
        resident: on the device already.
        host: attended to on the host.
        x_here: of `x`, those whose activation need not be carried: of the first layer, which come
            from the token ids, or held on the device.

    Raises:
        ConfigError: a negative number, or more of `x_here` than of `x`.
    """

    rows: int
    x: int = 0
    kv: int = 0
    resident: int = 0
    host: int = 0
    x_here: int = 0

    def __post_init__(self) -> None:
        if any(getattr(self, field.name) < 0 for field in fields(self)) or self.x_here > self.x:
            raise ConfigError(f"expected numbers of 0 or more, and x_here within x, got {self}")

    @property
    def x_transferred(self) -> int:
        """Tokens whose activation crosses the link."""
        return self.x - self.x_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of what crosses the link; 0 for what does not.

    Attributes:
        kv_bytes: of a token of a layer.
        x_bytes: of its activation.
        new_kv_bytes: of a row's new token, out.
        new_x_bytes: of its activation, out.
        hidden_bytes: of a row's hidden state between layers, in and out.
        kv_weight_bytes: of W_K and W_V of a layer.
        qo_weight_bytes: of W_Q and W_O.
        mlp_weight_bytes: of the MLP.
    """

    kv_bytes: int | float
    x_bytes: int | float
    new_kv_bytes: int | float = 0
    new_x_bytes: int | float = 0
    hidden_bytes: int | float = 0
    kv_weight_bytes: int | float = 0
    qo_weight_bytes: int | float = 0
    mlp_weight_bytes: int | float = 0

    @property
    def weight_bytes(self) -> int | float:
        """Of a whole layer."""
        return self.kv_weight_bytes + self.qo_weight_bytes + self.mlp_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How long operations take.

    Attributes:
        inward: of copies to the device.
        outward: of copies from it.
        project_token_s: of recomputing a token of a layer.
        project_call_s: of a call that recomputes.
        attend_token_s: of attending to a token on the device.
        attend_call_s: of a call that attends.
        host_token_s: of attending to a token on the host.
        host_call_s: of a call that does.
        row_s: of a row's other products in a layer.
        layer_s: of a layer, whatever its rows.
    """

    inward: CopyRate
    outward: CopyRate
    project_token_s: int | float
    project_call_s: int | float = 0.0
    attend_token_s: int | float = 0.0
    attend_call_s: int | float = 0.0
    host_token_s: int | float = 0.0
    host_call_s: int | float = 0.0
    row_s: int | float = 0.0
    layer_s: int | float = 0.0

    def rates(
        self, sizes: Sizes, *, rows: int, tokens: int, half_duplex: bool = False
    ) -> OffloadRates:
        """The rates of the formulas: what a layer of one batch takes, weights left out.

        Args:
            sizes: of what moves.
            rows: of the batch.
            tokens: of all its rows, which the device attends to.
            half_duplex: stores take time of the same wire.
        """
        byte_s = 1 / self.inward.bytes_per_s
        stored_bytes = rows * (sizes.new_kv_bytes + sizes.new_x_bytes) * half_duplex
        attend_s = self.attend_call_s + self.attend_token_s * tokens
        other_s = attend_s + self.row_s * rows + self.layer_s
        return OffloadRates(
            kv_s=sizes.kv_bytes * byte_s,
            x_s=sizes.x_bytes * byte_s,
            recompute_s=self.project_token_s,
            host_s=self.host_token_s or float("inf"),
            other_s=other_s,
            link_s=stored_bytes / self.outward.bytes_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """All that a step's schedule is made of.

    Attributes:
        layers: of each layer its batches; every layer has as many.
        sizes: bytes.
        speeds: seconds.

    Raises:
        ConfigError: no layer, or batches that differ in number.
    """

    layers: tuple[tuple[BatchTokens, ...], ...]
    sizes: Sizes
    speeds: Speeds

    def __post_init__(self) -> None:
        if not self.layers or len({len(batches) for batches in self.layers}) != 1:
            raise ConfigError("expected layers with the same number of batches each")

    @property
    def num_batches(self) -> int:
        """Batches that share a layer's weights."""
        return len(self.layers[0])


def even_layers(
    batches: Sequence[BatchTokens], num_layers: int, *, embedded: bool = True
) -> tuple[tuple[BatchTokens, ...], ...]:
    """The same batches in every layer.

    Args:
        batches: of a layer.
        num_layers: of the model.
        embedded: the first layer's activations come from the token ids, without a transfer.
    """
    first = tuple(
        BatchTokens(
            rows=batch.rows,
            x=batch.x,
            kv=batch.kv,
            resident=batch.resident,
            host=batch.host,
            x_here=batch.x if embedded else batch.x_here,
        )
        for batch in batches
    )
    return (first, *[tuple(batches)] * (num_layers - 1))
