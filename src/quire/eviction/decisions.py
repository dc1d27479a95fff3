"""Decisions of an eviction: the slots of some layers that a rule retains, checked."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.kv.lane_reader import LaneReader
from quire.layout.pages import LaneGroup
from quire.layout.statistics import Statistic
from quire.policies.eviction import Eviction
from quire.policies.view import KVView
from quire.scheduler.eviction_trace import EvictionEntry


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Consecutive layers of the model in one lane group.

    Attributes:
        group: the lane group.
        layers: indices of the layers in the group.
    """

    group: LaneGroup
    layers: range

    @property
    def first_layer(self) -> int:
        """The first layer in the model."""
        return self.group.layers[self.layers.start]


def consecutive(group: LaneGroup, layers: Sequence[int]) -> Iterator[range]:
    """Yield the layers of a group that are neighbours among `layers`, as indices in the group."""
    index = [layers.index(layer) for layer in group.layers]
    borders = [i for i in range(1, len(index)) if index[i] != index[i - 1] + 1]
    for start, stop in itertools.pairwise([0, *borders, len(index)]):
        yield range(start, stop)


@dataclass(frozen=True, slots=True)
class RetainedSlots:
    """The slots of some layers that an eviction retains, and those that get a record.

    Attributes:
        group: the lane group.
        reader: reader of the layers.
        retained: [lanes, slots] retained slots, in the order of positions.
        promoted: [lanes, slots] slots that get a record, in the order of positions; None for none.
    """

    group: LaneGroup
    reader: LaneReader
    retained: NDArray[np.bool_]
    promoted: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Selected:
    """Result of an eviction decision for some layers.

    Attributes:
        part: the layers.
        stored_mask: [lanes, slots] True for each retained slot, in storage order.
        entry: the evicted tokens.
        reader: reader of the layers.
        statistics: values to store before slots move.
        kept: [lanes, slots] retained slots, in the order of positions.
        promoted: [lanes, slots] slots that get a record, in the order of positions; None without
            promotion.
    """

    part: LayerPart
    stored_mask: NDArray[np.bool_]
    entry: EvictionEntry
    reader: LaneReader
    statistics: Mapping[Statistic, Tensor]
    kept: NDArray[np.bool_]
    promoted: NDArray[np.bool_] | None

    def is_of(self, group: LaneGroup) -> bool:
        """Whether the layers are in a lane group."""
        return self.part.group is group

    def store_statistics(self) -> None:
        """Store the statistics that the policy returned."""
        for statistic, numbers in self.statistics.items():
            self.reader.note(statistic, numbers)


def checked_mask(mask: object, eviction: Eviction, view: KVView, keep: Tensor) -> Tensor:
    """Return the mask after checking it.

    Raises:
        PolicyError: wrong type or shape, or a wrong number of slots.
    """
    name, shape = type(eviction.policy).__name__, list(view.positions.shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or list(mask.shape) != shape:
        got = f"a {type(mask).__name__}"
        if isinstance(mask, Tensor):
            got = f"{mask.dtype} {list(mask.shape)}"
        raise PolicyError(
            f"policy {name} must return a mask of type torch.bool and shape [lanes, slots] = "
            f"{shape}, got {got}"
        )
    kept = (mask & view.live).sum(dim=1)
    if eviction.spec.ragged:  # heads of a layer share the number of retained slots
        kept, keep = view.by_layer(kept).sum(dim=1), view.by_layer(keep).sum(dim=1)
    wrong = kept > keep if eviction.piece_tokens > 1 else kept != keep
    if bool(wrong.any()):
        lane = int(wrong.int().argmax())
        what = "layer" if eviction.spec.ragged else "lane"
        most = "at most " if eviction.piece_tokens > 1 else ""
        raise PolicyError(
            f"policy {name} must retain {most}{int(keep[lane])} live slots in {what} {lane}, but "
            f"retained {int(kept[lane])}"
        )
    return mask


def stacked(parts: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Stack the masks of all parts' lanes, padded to the widest."""
    slots = max(part.shape[1] for part in parts)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.pad(part, ((0, 0), (0, slots - part.shape[1]))) for part in parts])
