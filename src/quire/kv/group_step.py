"""What one lane group does in a step: plans, pages, and where new tokens go."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.backend import LayerPages, NewSlots
from quire.kv.full_precision import FullPrecisionStep
from quire.kv.mixed_precision import PromotedBuffer
from quire.kv.statistics.watching import GroupWatch


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What one lane group does in a step.

    Attributes:
        plans: the backend's plan for each layer.
        pages: the layers' pages.
        new_slots: where the layers write new tokens.
        positions: int32 [pages, tokens], all pages of the class; None where pages carry none.
        watch: what the rows have remembered; None where they have nothing.
        kept: tokens that stay as they were made; None where there are none.
        promoted: tokens in a finer codec, beside kept ones; None where there are none.
    """

    plans: tuple[object, ...]
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]
    positions: Tensor | None
    watch: GroupWatch | None
    kept: FullPrecisionStep | None
    promoted: PromotedBuffer | None
