"""What one step processes: requests and how many of their tokens."""

from dataclasses import dataclass, field

from quire.scheduler.request import Request


@dataclass(slots=True)
class StepPlan:
    """One step. The memory has grown for it already.

    Attributes:
        requests: rows of the flat batch.
        tokens: new tokens of each, from its `num_computed` on.
        num_decoding: the first so many decode.
        waits: nobody is in it because pages are on their way to those who could be.
    """

    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_decoding: int = 0
    waits: bool = False

    def add(self, request: Request, tokens: int) -> None:
        """Let a request process `tokens` more tokens in this step."""
        self.requests.append(request)
        self.tokens.append(tokens)

    @property
    def num_scored(self) -> int:
        """Tokens whose logits are all needed, because their prompts are scored."""
        parts = zip(self.requests, self.tokens, strict=True)
        return sum(tokens for request, tokens in parts if request.scores_prompt)
