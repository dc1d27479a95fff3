"""Rates of operations: measured at the start, then updated from every operation of every step.

    copies in, out        seconds = call_s + bytes / bytes_per_s
    project, attend       seconds = call_s + tokens * token_s
    layer                 seconds = layer_s + rows * row_s

Times of isolated operations are only a prior: concurrent operations of a step slow each other
down. A change detector finds lasting changes (another program takes half the link); the samples
after a change get full weight.
"""

from dataclasses import dataclass

from quire.offload.split import OffloadRates
from quire.offload.timeline import Operation, Span, TaskKind, Timeline
from quire.plan.fitting import ChangeDetector, RateEstimator
from quire.plan.rates import CopyRate

# An estimate of 0 would stay 0, so coefficients start at no less than these.
_MIN_CALL_S, _MIN_UNIT_S = 1e-6, 1e-12
COST_CLASSES = {
    TaskKind.WEIGHTS_IN: "in",
    TaskKind.KV_IN: "in",
    TaskKind.HIDDEN_IN: "in",
    TaskKind.X_IN: "in",
    TaskKind.KV_OUT: "out",
    TaskKind.HIDDEN_OUT: "out",
    TaskKind.PROJECT: "project",
    TaskKind.ATTEND: "attend",
    TaskKind.HOST_ATTEND: "host",
    TaskKind.LAYER: "layer",
}
"""Cost class of an operation; operations of one class share a cost law."""


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


@dataclass(slots=True)
class _Followed:
    estimator: RateEstimator
    detector: ChangeDetector


class OffloadProfiler:
    """Current estimates of the durations of an engine's operations.

    Args:
        prior: measured at the start, or assumed.
        forgetting: see `RateEstimator`.

    Attributes:
        num_changes: number of lasting changes detected.
    """

    def __init__(self, prior: Speeds, *, forgetting: float = 0.97) -> None:
        self.num_changes = 0
        self._prior = prior
        self._followed = {
            name: _Followed(
                RateEstimator((max(call_s, _MIN_CALL_S), max(unit_s, _MIN_UNIT_S)), forgetting),
                ChangeDetector(),
            )
            for name, (call_s, unit_s) in _coefficients(prior).items()
        }

    @property
    def speeds(self) -> Speeds:
        """Current estimates; the prior for operations that have not run."""
        before = _coefficients(self._prior)
        return speeds_of(
            {
                name: followed.estimator.coefficients
                if followed.estimator.num_samples
                else before[name]
                for name, followed in self._followed.items()
            }
        )

    def observe(self, timeline: Timeline) -> None:
        """Learn from every operation of a step."""
        for span in timeline.spans:
            self._learn(span)

    def _learn(self, span: Span) -> None:
        followed = self._followed[COST_CLASSES[span.operation.kind]]
        amounts = call_and_units(span.operation)
        if not amounts[1]:
            return
        predicted_s = followed.estimator.predict(amounts)
        if followed.detector.add(predicted_s, span.seconds):
            followed.estimator.reset_variance()
            self.num_changes += 1
        followed.estimator.add(amounts, span.seconds)


def call_and_units(operation: Operation) -> tuple[float, float]:
    """One call, and the bytes of a copy or the tokens of a product."""
    copies = COST_CLASSES[operation.kind] in ("in", "out")
    units = operation.num_bytes if copies else operation.tokens
    return 1.0, float(units)


def _coefficients(speeds: Speeds) -> dict[str, tuple[float, float]]:
    return {
        "in": (float(speeds.inward.call_s), 1 / speeds.inward.bytes_per_s),
        "out": (float(speeds.outward.call_s), 1 / speeds.outward.bytes_per_s),
        "project": (float(speeds.project_call_s), float(speeds.project_token_s)),
        "attend": (float(speeds.attend_call_s), float(speeds.attend_token_s)),
        "host": (float(speeds.host_call_s), float(speeds.host_token_s)),
        "layer": (float(speeds.layer_s), float(speeds.row_s)),
    }


def speeds_of(found: dict[str, tuple[float, ...]]) -> Speeds:
    """Build `Speeds` from (seconds per call, seconds per unit) by class; default: 0."""

    def of(name: str) -> tuple[float, float]:
        call_s, unit_s = found.get(name, (0.0, 0.0))
        return call_s, unit_s

    project, attend, host, layer = (of(name) for name in ("project", "attend", "host", "layer"))
    return Speeds(
        inward=_rate(*of("in")),
        outward=_rate(*of("out")),
        project_call_s=project[0],
        project_token_s=project[1],
        attend_call_s=attend[0],
        attend_token_s=attend[1],
        host_call_s=host[0],
        host_token_s=host[1],
        layer_s=layer[0],
        row_s=layer[1],
    )


def _rate(call_s: float, byte_s: float) -> CopyRate:
    return CopyRate(bytes_per_s=1 / max(byte_s, 1e-15), call_s=call_s)
