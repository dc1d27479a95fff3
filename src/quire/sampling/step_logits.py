"""What a step computed for the sampler: logits of the rows that need any."""

from dataclasses import dataclass

from torch import Tensor

from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step computed.

    Attributes:
        request: whose rows these are.
        first_position: logical position of the first row's token.
        logits: [rows, vocab]; row i belongs to the token at first_position + i.
    """

    request: Request
    first_position: int
    logits: Tensor
