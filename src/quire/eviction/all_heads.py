"""Eviction on several ranks: a rule sees the heads of all ranks, and each rank cuts its own.

    rank 0   heads 0 1 ─┐ gather            ┌─ own lanes of the mask
    rank 1   heads 2 3 ─┴─▶ view 0 1 2 3 ───┴─ own lanes of the mask

All ranks gather the same numbers, so the rule decides the same everywhere, and as on one rank.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from quire.errors import PolicyError
from quire.parallel.group import TensorGroup
from quire.policies.base import Decision
from quire.policies.view import KVView, SlotReader


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

    def own_part(self, decision: Decision, mask: Bool[Tensor, "all_lanes slot"]) -> Decision:
        """Return the part of a decision for this rank's lanes.

        Args:
            decision: decision for the lanes of all ranks.
            mask: its checked mask.

        Raises:
            PolicyError: the ranks would retain different numbers of tokens.
        """
        if self._group.size == 1:
            return replace(decision, retained=mask)
        self._require_equal(mask)
        statistics = {one: self.own(numbers) for one, numbers in decision.statistics.items()}
        return Decision(self.own(mask), statistics)

    def _require_equal(self, mask: Bool[Tensor, "all_lanes slot"]) -> None:
        by_rank = self._by_rank(mask.sum(dim=1))
        if bool((by_rank != by_rank[:, :1]).any()):
            raise PolicyError(
                f"the {self._group.size} ranks would retain different numbers of tokens, and they "
                "share one schedule; use granularity=token, or a rule with one set per layer"
            )


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

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        return self._heads.joined(self._own.values())
