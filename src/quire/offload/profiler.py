"""Bytes and durations of the operations of a step."""

from dataclasses import dataclass

from quire.offload.split import OffloadRates
from quire.plan.rates import CopyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that cross the link; 0 for data that does not.

    Attributes:
        kv_bytes: KV of a token in a layer.
        x_bytes: activation of a token in a layer.
        new_kv_bytes: KV of a row's new token, device to host.
        new_x_bytes: activation of a row's new token, device to host.
        hidden_bytes: hidden state of a row between layers, in each direction.
        kv_weight_bytes: W_K and W_V of a layer.
        qo_weight_bytes: W_Q and W_O of a layer.
        mlp_weight_bytes: MLP weights of a layer.
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
        """Weights of a whole layer."""
        return self.kv_weight_bytes + self.qo_weight_bytes + self.mlp_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Durations of operations.

    Attributes:
        inward: rate of copies to the device.
        outward: rate of copies from the device.
        project_token_s: recompute of a token's KV in a layer.
        project_call_s: fixed cost of a recompute call.
        attend_token_s: attention to a token on the device.
        attend_call_s: fixed cost of an attention call on the device.
        host_token_s: attention to a token on the CPU.
        host_call_s: fixed cost of an attention call on the CPU.
        row_s: other products of a row in a layer.
        layer_s: fixed cost of a layer.
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

    def rates_with_weights(
        self, sizes: Sizes, *, rows: int, tokens: int, batches: int = 1
    ) -> OffloadRates:
        """Rates of a layer of one batch, with its part of the transfer of the layer's weights.

        Args:
            sizes: bytes that cross the link.
            rows: number of rows of the batch.
            tokens: tokens of all rows, which the device attends to.
            batches: number of batches that share a transferred layer.
        """
        weights_s = sizes.weight_bytes / self.inward.bytes_per_s
        return self.rates(sizes, rows=rows, tokens=tokens).with_weights(weights_s, batches)

    def rates(
        self, sizes: Sizes, *, rows: int, tokens: int, half_duplex: bool = False
    ) -> OffloadRates:
        """Rates of the formulas in `quire.offload.split` for a layer of one batch, without weights.

        Args:
            sizes: bytes that cross the link.
            rows: number of rows of the batch.
            tokens: tokens of all rows, which the device attends to.
            half_duplex: whether both directions share the link.
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
