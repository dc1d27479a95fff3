"""A step: its plan, its size, and the time spent in steps.

With weight offload a step is one batch, or several batches that share each prefetched layer:

    latency      one batch of `max_num_batched_tokens`; every batch transfers all offloaded layers
                 (row by row)
    throughput   the maximum number of batches; each layer is transferred once for all of them, and
                 hidden states wait between layers (column by column)
    auto         the fewest batches whose computation hides the transfers, by measured times

The size of a batch, and so of its activations, does not change. Without weight offload a step is
one batch. With KV offload, each batch waits for its own offloaded pages only.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from quire.layout import limits
from quire.plan.weights import MAX_BATCHES, WeightsPlacement, best_batches
from quire.scheduler.lanes import LayerPrefill
from quire.scheduler.request import Request

_NEW_SHARE = 0.2  # weight of the newest sample in the moving average of batch times
_FULL = 0.5  # least fraction of a full batch that is sampled


# ---- plan and times ------------------------------------------------------------------------------


@dataclass(slots=True)
class StepPlan:
    """Plan of one step; its pages are allocated already.

    Attributes:
        requests: rows of the flat batch.
        tokens: number of new tokens of each request, after its `num_computed`.
        num_decoding: number of decoding rows, which come first.
        waits: whether the plan is empty because pages of prefixes are being loaded.
        unserved: a running request that got no tokens; none is admitted before it.
        is_full: whether the step had no tokens left for a new request.
        by_layer: the prompts of the step that are computed layer by layer, after all other rows;
            None if there are none.
        scoring: slots for the scoring passes of other prompts that the step ends, after their own.
        pending: sampled tokens on the device that the step reads; None if all tokens are known. A
            `quire.sampling.pending_tokens.PendingTokens`, which the scheduler does not use.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_decoding: int = 0
    waits: bool = False
    unserved: Request | None = None
    is_full: bool = False
    by_layer: LayerPrefill | None = None
    scoring: dict[Request, int] = field(default_factory=dict)
    pending: object | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is planned and no prefix is being loaded."""
        return not (self.requests or self.waits)

    def add(self, request: Request, tokens: int) -> None:
        """Add the next `tokens` tokens of a request to the step."""
        self.requests.append(request)
        self.tokens.append(tokens)

    @property
    def scored(self) -> list[Request]:
        """The requests whose prompt is followed by a scoring pass."""
        return [*self.scoring, *(() if self.by_layer is None else self.by_layer.scoring)]

    def scoring_tokens(self, request: Request) -> int:
        """Tokens of the scoring pass of a request in this step."""
        if request not in self.scored:
            return 0
        return request.eviction.spec.scoring_tokens(len(request.prompt_token_ids))

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that the step computes, those of scoring passes included."""
        scored = (ids for request in self.scored for ids in request.spec.scoring_token_ids)
        return sum(self.tokens) + sum(map(len, scored))

    @property
    def num_scored(self) -> int:
        """Number of tokens of prompts with log-probabilities, whose logits are all needed."""
        rows = zip(self.requests, self.tokens, strict=True)
        return sum(tokens for request, tokens in rows if request.scores_prompt)


@dataclass(slots=True)
class StepTimes:
    """Time spent in steps since the engine's start, in seconds.

    Attributes:
        steps_s: total time of steps, without sampling and detokenization.
        schedule_s: time to select rows, allocate pages and evict.
        prepare_s: time to build the flat batch: token ids, positions, slots, buckets.
    """

    steps_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0

    def scheduled(self, seconds: float) -> None:
        """Add the time of planning a step."""
        self.schedule_s += seconds
        self.steps_s += seconds

    @property
    def bookkeeping_share(self) -> float:
        """Fraction (0 to 1) of the steps' time that is spent outside of the model forward."""
        return (self.schedule_s + self.prepare_s) / self.steps_s if self.steps_s else 0.0


# ---- size ----------------------------------------------------------------------------------------


@runtime_checkable
class WeightTransfers(Protocol):
    """Measurements of weight transfers that step sizes depend on."""

    @property
    def place(self) -> WeightsPlacement:
        """Placement of the weights in device and host memory."""

    @property
    def device_s(self) -> float:
        """Seconds of computation on the device since the start, without waiting for layers."""

    @property
    def copied_s(self) -> float:
        """Seconds of transfers since the start."""

    @property
    def num_bytes(self) -> int:
        """Bytes transferred since the start."""


class StepSize:
    """Maximum number of tokens of the next step.

    Args:
        batch_tokens: maximum tokens of one batch.
        objective: see above.
        offloaded_weights: transfers of offloaded layers; None without weight offload.

    Attributes:
        batch_tokens: see above.
        num_batches: maximum number of batches in the next step.
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
            max_batches(objective, offloaded_weights) if objective == "throughput" else 1
        )
        self._batch_s: float | None = None  # computation time of a full batch
        self._seen_s = 0.0 if offloaded_weights is None else offloaded_weights.device_s

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of the next step."""
        return self.batch_tokens * self.num_batches

    @property
    def shares_layers(self) -> bool:
        """Whether batches of a step can share prefetched layers."""
        return self._offloaded_weights is not None

    def learn(self, tokens: int) -> None:
        """Update the number of batches after a step.

        Args:
            tokens: number of tokens that the step computed.
        """
        offloaded_weights = self._offloaded_weights
        if offloaded_weights is None or self._objective != "auto":
            return
        step_s, self._seen_s = offloaded_weights.device_s - self._seen_s, offloaded_weights.device_s
        if step_s > 0 and tokens >= _FULL * self.batch_tokens:
            batch_s = step_s * self.batch_tokens / tokens
            old_s = batch_s if self._batch_s is None else self._batch_s
            self._batch_s = old_s + _NEW_SHARE * (batch_s - old_s)
        if self._batch_s is not None and offloaded_weights.num_bytes:
            copy_s = (
                offloaded_weights.copied_s
                * offloaded_weights.place.host_bytes
                / offloaded_weights.num_bytes
            )
            self.num_batches = best_batches(copy_s, self._batch_s)


def max_batches(objective: str, offloaded_weights: WeightTransfers | None) -> int:
    """Maximum number of batches in one step."""
    return 1 if offloaded_weights is None or objective == "latency" else MAX_BATCHES


def refuse_nothing_shared(objective: str, *, offloaded_weights: bool) -> None:
    """Refuse the objective `throughput` if it would have no effect.

    Args:
        objective: `ScheduleConfig.objective`.
        offloaded_weights: whether weights are offloaded.

    Raises:
        UnsoundCombination: `throughput` without weight offload.
    """
    if objective == "throughput" and not offloaded_weights:
        raise limits.refused(limits.NOTHING_SHARED)
