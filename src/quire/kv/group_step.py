"""The state of one lane group in a step: plans, pages, and slots of new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionMath, LayerPages, NewSlots
from quire.kernels.chains import ChainBackend, HeadBuffers
from quire.kv.flat_batch import FlatBatch
from quire.kv.full_precision import FullPrecisionStep
from quire.kv.mixed_precision import PromotedBuffer
from quire.kv.pages import PageNumbers
from quire.kv.statistics.watching import GroupWatch


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The state of one lane group in a step."""

    plans: tuple[object, ...]  # of each layer
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]  # of the new tokens in each layer
    new_places: tuple[Tensor, Tensor]  # pages and offsets, each [layers, tokens, lanes of a layer]
    # int32 [pages, tokens] of all pages of the class; None if pages have no positions
    positions: Tensor | None
    watch: GroupWatch | None  # None if no row uses any statistic
    full_precision: FullPrecisionStep | None  # None if the group has none
    promoted: PromotedBuffer | None  # in addition to these; None if the group has none

    @property
    def is_plain(self) -> bool:
        """Whether a layer needs nothing but writing new slots and attention.

        Positions can be written for all layers together: attention does not read them.
        """
        extras = (self.watch, self.full_precision, self.promoted)
        return all(extra is None for extra in extras)

    def write_positions(self, positions: Tensor) -> None:
        """Store the positions, int32 [tokens, 1], of the new tokens in all layers."""
        if self.positions is not None:
            pages, offsets = self.new_places
            self.positions[pages, offsets] = positions.expand_as(pages)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer in a step."""

    group: GroupStep
    index: int  # of the layer in the group
    math: AttentionMath

    @property
    def plan(self) -> object:
        return self.group.plans[self.index]


def chained(
    backend: ChainBackend, layers: Sequence[LayerStep], heads: HeadBuffers
) -> list[object] | None:
    """Prepare layers of one plan together; None if the backend has no calls for a layer."""
    by_plan: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        by_plan.setdefault(id(layer.plan), []).append(number)
    calls: dict[int, object] = {}
    for numbers in by_plan.values():
        parts = [
            (own.group.pages[own.index], own.group.new_slots[own.index], own.math)
            for own in (layers[number] for number in numbers)
        ]
        prepared = backend.chain(layers[numbers[0]].plan, parts, heads)
        if prepared is None:
            return None
        calls.update(zip(numbers, prepared, strict=True))
    return [calls[number] for number in range(len(layers))]


@dataclass(slots=True)
class ChainedStep:
    """The last step that ran as a chain, which a later decode step of the same rows continues.

    From one decode step to the next, only numbers change: live slots, and places of new tokens.
    They are written into the arrays that the calls point to.
    """

    batch: FlatBatch | None = None
    groups: Mapping[str, GroupStep] = field(default_factory=dict)
    layers: Sequence[AttentionMath] = ()
    heads: HeadBuffers | None = None
    calls: list[object] | None = None

    def continued(
        self,
        backend: ChainBackend,
        batch: FlatBatch,
        name: str,
        pages: tuple[LayerPages, ...],
        slots: NDArray[np.int32],
        places: tuple[PageNumbers, NDArray[np.int64]],
    ) -> GroupStep | None:
        """A lane group changed to the next step, places [layers, tokens, lanes]; or None."""
        last = self.groups.get(name)
        if last is None or batch is not self.batch or pages is not last.pages:
            return None
        plans = {id(plan): plan for plan in last.plans}.values()  # in the order of the layers
        if len(plans) < len(pages) and not (slots == slots[:, :1, :1]).all():
            return None
        if not all(backend.advance(plan, slots[:, layer]) for layer, plan in enumerate(plans)):
            return None
        for held, new in zip(last.new_places, places, strict=True):
            held.numpy()[:] = new
        return last

    def calls_of(
        self, groups: Mapping[str, GroupStep], layers: Sequence[AttentionMath], heads: HeadBuffers
    ) -> list[object] | None:
        """Return the calls of the layers if this step's calls serve these groups."""
        same = self.heads is heads and self.layers is layers
        if same and all(groups[name] is group for name, group in self.groups.items()):
            return self.calls
        return None
