"""The place of a batch in a step of several batches that run layer by layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPart:
    """A batch of a step; several batches share each layer (column by column).

    Attributes:
        number: index of the batch in the step.
        count: number of batches that share a layer.
    """

    number: int = 0
    count: int = 1


WHOLE_STEP = StepPart()
