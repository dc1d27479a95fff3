"""Carries an eviction out: ask the policy which slots stay, then compact the lanes."""

import torch
from jaxtyping import Bool
from torch import Tensor

from quire.engine.request import Request
from quire.errors import PolicyError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.step import PagedKV
from quire.kv.tables import LaneTable
from quire.policies.eviction import Eviction
from quire.policies.view import KVView

NO_SLOT = -1
_BEHIND_ALL = 1 << 40  # sorts places without a slot behind the last one


class Evictor:
    """Applies an eviction to the lanes without order of a KV memory.

    Args:
        kv: bookkeeping and bytes.
        eviction: what stays.
        heads: KV heads of a layer.
    """

    def __init__(self, kv: PagedKV, eviction: Eviction, heads: int) -> None:
        self._kv, self._eviction, self._heads = kv, eviction, heads

    def __call__(self, request: Request, keep: int) -> None:
        """Leave `keep` slots in every evicting lane of a request.

        Raises:
            PolicyError: the policy broke its contract.
        """
        for table in self._kv.memory.tables.values():
            if not table.group.ordered and not table.group.private:
                self._evict_group(table, request, keep)

    def _evict_group(self, table: LaneTable, request: Request, keep: int) -> None:
        memory, group = self._kv.memory, table.group
        stored = self._positions(table, request.row)  # in the order of slots
        order = stored.masked_fill(stored < 0, _BEHIND_ALL).argsort(dim=1)
        heads = self._heads // group.lanes_per_layer
        view = KVView(
            stored.gather(1, order).repeat_interleave(heads, dim=0),
            int(memory.lengths[request.row]),
            heads_per_layer=self._heads,
            layers=group.layers,
            prompt_tokens=len(request.prompt_token_ids),
        )
        kept = self._checked(self._select(view, keep), view, keep)
        mask = torch.zeros_like(stored, dtype=torch.bool)
        mask.scatter_(1, order, _of_lanes(kept, heads))
        plan = plan_compaction(memory, group.name, request.row, mask.cpu().numpy())
        commit_compaction(memory, plan)

    def _select(self, view: KVView, keep: int) -> object:
        """Ask the policy; whatever it raises is its request's business and nobody else's."""
        wanted = torch.full((len(view.positions),), keep, device=view.positions.device)
        try:
            return self._eviction.select(view, wanted)
        except PolicyError:
            raise
        except Exception as error:
            name = type(self._eviction.policy).__name__
            raise PolicyError(f"policy {name} raised {type(error).__name__}: {error}") from error

    def _checked(self, mask: object, view: KVView, keep: int) -> Tensor:
        name, shape = type(self._eviction.policy).__name__, list(view.positions.shape)
        if not isinstance(mask, Tensor):
            raise PolicyError(
                f"policy {name} must give a mask, a tensor of type torch.bool {shape}, got a "
                f"{type(mask).__name__}"
            )
        if mask.dtype != torch.bool or list(mask.shape) != shape:
            raise PolicyError(
                f"policy {name} must give a mask of type torch.bool {shape}, got {mask.dtype} "
                f"{list(mask.shape)}"
            )
        kept = (mask & view.live).sum(dim=1)
        if bool((kept != keep).any()):
            raise PolicyError(
                f"policy {name} must keep {keep} live slots in each lane, it kept "
                f"{sorted(set(kept.tolist()))}"
            )
        return mask

    def _positions(self, table: LaneTable, row: int) -> Tensor:
        """[lanes, slots] logical positions, NO_SLOT behind a lane's last slot."""
        views = self._kv.store.views(table.group.page_class)
        assert views.positions is not None, "lanes without order carry positions"
        columns = int(table.num_pages[row].max())
        pages = self._kv.tables[table.group.name].current()[row, :, :columns].long()
        positions = views.positions[pages.clamp_min(0)].flatten(1).long()
        slots = torch.from_numpy(table.num_slots[row].copy()).to(positions.device)
        slot = torch.arange(positions.shape[1], device=positions.device)
        return positions.masked_fill(slot >= slots[:, None], NO_SLOT)


def _of_lanes(kept: Bool[Tensor, "head slot"], heads: int) -> Bool[Tensor, "lane slot"]:
    """One mask for each lane of a table, of the heads that it holds, which must agree."""
    by_lane = kept.view(-1, heads, kept.shape[1])
    if bool((by_lane != by_lane[:, :1]).any()):
        raise PolicyError("the heads of a layer share its pages, and so must keep the same tokens")
    return by_lane[:, 0]
