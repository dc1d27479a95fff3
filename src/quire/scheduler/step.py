"""What one step computes, and where the time of steps goes."""

from dataclasses import dataclass, field

from quire.scheduler.request import Request


@dataclass(slots=True)
class StepPlan:
    """One step. The memory has grown for it already.

    Attributes:
        requests: rows of the flat batch.
        tokens: new tokens of each, from its `num_computed` on.
        num_decoding: the first `num_decoding` requests decode.
        waits: no request is planned, because pages of their prefixes are being loaded.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_decoding: int = 0
    waits: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned and nothing is being loaded."""
        return not (self.requests or self.waits)

    def add(self, request: Request, tokens: int) -> None:
        """Compute `tokens` more tokens of a request in this step."""
        self.requests.append(request)
        self.tokens.append(tokens)

    @property
    def num_scored(self) -> int:
        """Tokens whose logits are all needed, because their prompts are scored."""
        parts = zip(self.requests, self.tokens, strict=True)
        return sum(tokens for request, tokens in parts if request.scores_prompt)


@dataclass(slots=True)
class StepTimes:
    """Seconds since the engine's start, summed over all steps.

    Attributes:
        steps_s: whole steps without sampling and detokenizing.
        schedule_s: choosing rows, allocating pages, evicting.
        prepare_s: building the flat batch: token ids, positions, slots, buckets.
    """

    steps_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0

    def scheduled(self, seconds: float) -> None:
        """Add the time that planning a step took."""
        self.schedule_s += seconds
        self.steps_s += seconds

    @property
    def bookkeeping_share(self) -> float:
        """Fraction of the steps' time that is neither model nor attention."""
        return (self.schedule_s + self.prepare_s) / self.steps_s if self.steps_s else 0.0
