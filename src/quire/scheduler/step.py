"""The plan of a step, and the time spent in steps."""

from dataclasses import dataclass, field

from quire.scheduler.request import Request


@dataclass(slots=True)
class StepPlan:
    """Plan of one step; its pages are allocated already.

    Attributes:
        requests: rows of the flat batch.
        tokens: number of new tokens of each request, after its `num_computed`.
        num_decoding: number of decoding rows, which come first.
        waits: whether the plan is empty because pages of prefixes are being loaded.
        pending: sampled tokens on the device that the step reads; None if all tokens are known. A
            `quire.sampling.pending_tokens.PendingTokens`, which the scheduler does not use.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_decoding: int = 0
    waits: bool = False
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
