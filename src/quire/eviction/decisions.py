"""Decisions of an eviction: the slots of some layers that a rule retains, checked.

On several ranks, a rule sees the heads of all ranks, and each rank cuts its own:

    rank 0   heads 0 1 ─┐ gather            ┌─ own lanes of the mask
    rank 1   heads 2 3 ─┴─▶ view 0 1 2 3 ───┴─ own lanes of the mask

All ranks gather the same numbers, so the rule decides the same everywhere, and as on one rank.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.kernels import device_copies
from quire.kernels.device_copies import start_read
from quire.kv.lane_reader import LaneReader
from quire.layout.pages import LaneGroup
from quire.parallel.group import TensorGroup
from quire.policies.eviction import Eviction
from quire.policies.view import KVView, OutputProjection, SlotReader
from quire.scheduler.eviction_trace import EvictionEntry, in_runs
from quire.scheduler.request import Request


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
        kept: [lanes, slots] retained slots, in the order of positions.
        promoted: [lanes, slots] slots that get a record, in the order of positions; None without
            promotion.
    """

    part: LayerPart
    stored_mask: NDArray[np.bool_]
    entry: EvictionEntry
    reader: LaneReader
    kept: NDArray[np.bool_]
    promoted: NDArray[np.bool_] | None

    def is_of(self, group: LaneGroup) -> bool:
        """Whether the layers are in a lane group."""
        return self.part.group is group


def checked_mask(mask: object, eviction: Eviction, view: KVView, keep: Tensor) -> Tensor:
    """Return the mask after checking it.

    Raises:
        PolicyError: wrong type or shape, or a wrong number of slots.
    """
    name, mask = type(eviction.policy).__name__, shaped_mask(mask, eviction, view)
    kept = (mask & view.live).sum(dim=1)
    if eviction.spec.ragged:  # heads of a layer share the number of retained slots
        kept, keep = view.by_layer(kept).sum(dim=1), view.by_layer(keep).sum(dim=1)
    wrong = kept > keep if eviction.retains_fewer else kept != keep
    if view.breaks_contract(wrong):
        lane = int(wrong.int().argmax())
        what = "layer" if eviction.spec.ragged else "lane"
        most = "at most " if eviction.retains_fewer else ""
        raise PolicyError(
            f"policy {name} must retain {most}{int(keep[lane])} live slots in {what} {lane}, but "
            f"retained {int(kept[lane])}"
        )
    if view.breaches is None:
        return mask & view.live
    # the memory of the lanes follows from the counts, whatever the rule returned
    return torch.where(wrong[:, None], view.newest(keep[:, None]), mask & view.live)


def shaped_mask(mask: object, eviction: Eviction, view: KVView) -> Bool[Tensor, "lane slot"]:
    """Return the mask after checking its type and shape.

    Raises:
        PolicyError: wrong type or shape.
    """
    name, shape = type(eviction.policy).__name__, list(view.positions.shape)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and list(mask.shape) == shape:
        return mask
    got = f"a {type(mask).__name__}"
    if isinstance(mask, Tensor):
        got = f"{mask.dtype} {list(mask.shape)}"
    raise PolicyError(
        f"policy {name} must return a mask of type torch.bool and shape [lanes, slots] = "
        f"{shape}, got {got}"
    )


class EvictedTokens:
    """The positions that one eviction of several requests has evicted; read after the step.

    Args:
        requests: the requests.
        counts: [request, lane] evicted slots, in the order of the model's lanes.
        parts: for some layers each, the number of evicted slots of each lane and their positions:
            flat in the order of lanes, padded [lane, evicted], or behind two numbers of each lane,
            of which the first is not 0 if the rule broke its contract (`SelectedSlots.evicted`).
        breaches: conditions that the rule must not meet, on the device; none on a CPU.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        counts: NDArray[np.int32],
        parts: Sequence[tuple[NDArray[np.int64], Tensor]],
        breaches: Sequence[Tensor],
    ) -> None:
        self.requests = tuple(requests)
        self._counts = counts
        self._parts = [(gone, start_read(positions)) for gone, positions in parts]
        self._breach = start_read(torch.stack(list(breaches)).any()) if breaches else None
        self._stored: list[NDArray[np.int32]] | None = None
        self._marked = False

    def entry(self, index: int) -> EvictionEntry:
        """The evicted tokens of a request."""
        done = self.requests[index].progress.num_computed
        return EvictionEntry(done, self._counts[index], lambda: self._settled()[index])

    def settle(self) -> bool:
        """Wait for the positions; return whether the rule broke its contract."""
        self._settled()
        breach, self._breach = self._breach, None
        return self._marked or (breach is not None and bool(breach().any()))

    def _settled(self) -> list[NDArray[np.int32]]:
        if self._stored is None:
            by_part = [self._rows_of(gone, read()) for gone, read in self._parts]
            self._parts = []
            rows = (
                by_part[0] if len(by_part) == 1 else map(np.concatenate, zip(*by_part, strict=True))
            )
            self._stored = [in_runs(row) for row in rows]
        return self._stored

    def _rows_of(
        self, gone: NDArray[np.int64], positions: NDArray[np.generic]
    ) -> list[NDArray[np.int32]]:
        """Split the positions of some layers by request."""
        if positions.ndim == 2:  # padded to the most of any lane
            if positions.shape[1] > int(gone.max(initial=0)):
                self._marked |= bool(positions[:, 0].any())
                positions = positions[:, 2:]
            positions = positions[np.arange(positions.shape[1]) < gone[:, None]]
        of_row = gone.reshape(len(self._counts), -1).sum(axis=1)
        return np.split(positions.astype(np.int32), np.cumsum(of_row)[:-1])


def evicted_positions(
    reader: LaneReader, kept: Bool[Tensor, "lane slot"], gone: NDArray[np.int64]
) -> Int[Tensor, "..."]:
    """Return the positions that are not retained, ascending in each lane.

    Args:
        reader: reader of the lanes.
        kept: retained slots by position.
        gone: [lane] number of evicted slots.

    Returns:
        Flat on a CPU; elsewhere [lane, evicted], where a lane with fewer is padded.
    """
    positions, left = reader.order.positions, reader.live & ~kept
    if device_copies.reads_freely(left.device):
        return positions[left]
    width = int(gone.max(initial=0))
    place = torch.where(left, left.cumsum(dim=1) - 1, width).clamp_max(width)
    found = positions.new_zeros(len(positions), width + 1)
    return found.scatter_(1, place, positions)[:, :width]


def stacked(parts: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Stack the masks of all parts' lanes, padded to the widest."""
    slots = max(part.shape[1] for part in parts)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.pad(part, ((0, 0), (0, slots - part.shape[1]))) for part in parts])


class AllHeads:
    """Lanes of all ranks for some layers, and which of them are this rank's.

    Args:
        group: the ranks.
        layers: number of layers.
    """

    def __init__(self, group: TensorGroup, layers: int) -> None:
        self._group, self._layers = group, layers

    def view(self, view: KVView) -> KVView:
        """Return the view of the lanes of all ranks."""
        if self._group.size == 1:
            return view
        assert view.slots is not None, "views of an evictor have keys and values"
        return replace(
            view,
            positions=self.joined(view.positions),
            heads_per_layer=view.heads_per_layer * self._group.size,
            statistics={name: self.joined(of) for name, of in view.statistics.items()},
            slots=_GatheredSlots(view.slots, self),
            projection=view.projection and _GatheredProjection(view.projection, self),
        )

    def joined(self, own: Shaped[Tensor, "lane ..."]) -> Shaped[Tensor, "all_lanes ..."]:
        """Gather the rows of this rank's lanes from all ranks, layer-major."""
        if self._group.size == 1:
            return own
        parts = [one.reshape(self._layers, -1, *one.shape[1:]) for one in self._group.gather(own)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def own(self, joined: Shaped[Tensor, "all_lanes ..."]) -> Shaped[Tensor, "lane ..."]:
        """Return the rows of this rank's lanes; the inverse of `joined`."""
        if self._group.size == 1:
            return joined
        return self._by_rank(joined)[:, self._group.rank].flatten(0, 1)

    def _by_rank(self, joined: Tensor) -> Tensor:
        """Reshape [lane of all ranks, ...] to [layer, rank, head, ...] without copying."""
        return joined.reshape(self._layers, self._group.size, -1, *joined.shape[1:])

    def own_part(self, mask: Bool[Tensor, "all_lanes slot"]) -> Bool[Tensor, "lane slot"]:
        """Return the part of a mask for this rank's lanes.

        Args:
            mask: checked mask of the lanes of all ranks.

        Raises:
            PolicyError: the ranks would retain different numbers of tokens.
        """
        if self._group.size == 1:
            return mask
        by_rank = self._by_rank(mask.sum(dim=1))
        if bool((by_rank != by_rank[:, :1]).any()):
            raise PolicyError(
                f"the {self._group.size} ranks would retain different numbers of tokens, and they "
                "share one schedule; use granularity=token, or a rule with one set per layer"
            )
        return self.own(mask)


class _GatheredSlots:
    """Keys and values of the lanes of all ranks, gathered on demand.

    Args:
        own: keys and values of this rank's lanes.
        heads: the lanes of all ranks.
    """

    def __init__(self, own: SlotReader, heads: AllHeads) -> None:
        self._own, self._heads = own, heads

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return self._heads.joined(self._own.keys())

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        return self._heads.joined(self._own.values())


@dataclass(frozen=True, slots=True)
class _GatheredProjection:
    """Lengths of the values of all ranks, each computed by the rank that has its heads."""

    own: OutputProjection
    heads: AllHeads

    def lengths(
        self, layers: Sequence[int], values: Float[Tensor, "lane slot value_dim"]
    ) -> Float[Tensor, "lane slot"]:
        return self.heads.joined(self.own.lengths(layers, self.heads.own(values)))
