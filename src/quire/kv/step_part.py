"""The place of a batch in a step of several batches that run layer by layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPart:
    """A batch of a step; several batches share each layer (column by column)."""

    number: int = 0  # index of the batch in the step
    count: int = 1  # batches that share a layer


WHOLE_STEP = StepPart()
