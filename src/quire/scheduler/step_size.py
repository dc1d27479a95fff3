"""How many tokens a step processes: one batch, or several that share the layers brought for it.

    latency      one batch of `max_num_batched_tokens`: each brings all layers (row by row)
    throughput   as many batches as may share a pass: layers are brought once for all of them, and
                 hidden states wait between layers (column by column)
    auto         as few as hide what is brought behind the device's work, by what both have taken

A batch keeps its size, so activations do. Where all weights are on the device nothing is shared,
and a step is one batch; so it is where pages of its rows are brought too.
"""

from typing import Protocol, runtime_checkable

from quire.errors import UnsoundCombination
from quire.plan.offload.resident import MOST_BATCHES, WeightsPlacement, best_pass

_NEW_SHARE = 0.2  # of what the last full batches took, in what the next is expected to take
_FULL = 0.5  # of a batch's tokens: smaller ones say little of a full one


@runtime_checkable
class WeightTransfers(Protocol):
    """Transfers of offloaded layers, as far as step sizes depend on them."""

    @property
    def place(self) -> WeightsPlacement:
        """Where weights lie."""

    @property
    def device_s(self) -> float:
        """The device's own work since the start, without waiting for layers."""

    @property
    def copied_s(self) -> float:
        """What copies have taken since the start."""

    @property
    def num_bytes(self) -> int:
        """Bytes transferred since the start."""


class StepSize:
    """Tokens of the next step.

    Args:
        batch_tokens: of one batch.
        objective: see above.
        offloaded_weights: what brings layers; None where all are on the device.

    Attributes:
        batch_tokens: of one batch.
        num_batches: that may share the next step.
    """

    def __init__(
        self,
        batch_tokens: int,
        objective: str = "auto",
        offloaded_weights: WeightTransfers | None = None,
    ) -> None:
        self.batch_tokens, self._objective = batch_tokens, objective
        self._offloaded_weights = offloaded_weights
        self.num_batches = (
            most_batches(objective, offloaded_weights) if objective == "throughput" else 1
        )
        self._batch_s: float | None = None  # the device's work on a full batch
        self._seen_s = 0.0 if offloaded_weights is None else offloaded_weights.device_s

    @property
    def tokens(self) -> int:
        """Of the next step at most."""
        return self.batch_tokens * self.num_batches

    @property
    def shares_layers(self) -> bool:
        """Whether batches of a step can share layers that are brought for it."""
        return self._offloaded_weights is not None

    def learn(self, tokens: int) -> None:
        """A step has ended.

        Args:
            tokens: that it processed.
        """
        offloaded_weights = self._offloaded_weights
        if offloaded_weights is None or self._objective != "auto":
            return
        took_s, self._seen_s = offloaded_weights.device_s - self._seen_s, offloaded_weights.device_s
        if took_s > 0 and tokens >= _FULL * self.batch_tokens:
            batch_s = took_s * self.batch_tokens / tokens
            old_s = batch_s if self._batch_s is None else self._batch_s
            self._batch_s = old_s + _NEW_SHARE * (batch_s - old_s)
        if self._batch_s is not None and offloaded_weights.num_bytes:
            copy_s = (
                offloaded_weights.copied_s
                * offloaded_weights.place.host_bytes
                / offloaded_weights.num_bytes
            )
            self.num_batches = best_pass(
                copy_s=copy_s,
                batch_s=self._batch_s,
                batch_tokens=self.batch_tokens,
                most_batches=MOST_BATCHES,
            ).batches


def most_batches(objective: str, offloaded_weights: WeightTransfers | None) -> int:
    """Batches of one step at most."""
    return 1 if offloaded_weights is None or objective == "latency" else MOST_BATCHES


def refuse_nothing_shared(
    objective: str, *, offloaded_weights: bool, offloaded: bool = False
) -> None:
    """Refuse an objective that would change nothing.

    Args:
        objective: of the schedule.
        offloaded_weights: whether layers' weights lie outside of the device.
        offloaded: whether first pages of sequences that run may lie on the host.

    Raises:
        UnsoundCombination: `throughput` where they do not, or where steps are one batch anyway.
    """
    if objective == "throughput" and offloaded:
        raise UnsoundCombination(
            "with --kv-offload-memory a step is one batch, whose rows' pages are brought in turn "
            "with its layers: use --objective latency or auto, or leave out --kv-offload-memory"
        )
    if objective == "throughput" and not offloaded_weights:
        raise UnsoundCombination(
            "--objective throughput lets batches of a step share the layers that are brought for "
            "it, and all weights are on the device: give --weights-memory less than they take, or "
            "raise --max-num-batched-tokens for larger steps"
        )
