"""Carries an eviction out: ask the policy which slots stay, then compact the lanes."""

import torch
from torch import Tensor

from quire.engine.request import Request
from quire.errors import PolicyError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.step import PagedKV
from quire.kv.tables import LaneTable
from quire.policies.base import EvictionPolicy, KVView

NO_SLOT = -1


class Evictor:
    """Applies one policy to the lanes without order of a KV memory."""

    def __init__(self, kv: PagedKV, policy: EvictionPolicy) -> None:
        self._kv, self._policy = kv, policy

    def __call__(self, request: Request, keep: int) -> None:
        """Leave `keep` slots in every evicting lane of a request.

        Raises:
            PolicyError: the policy broke its contract.
        """
        for table in self._kv.memory.tables.values():
            if not table.group.ordered and not table.group.private:
                self._evict_group(table, request.row, keep)

    def _evict_group(self, table: LaneTable, row: int, keep: int) -> None:
        memory = self._kv.memory
        view = KVView(self._positions(table, row), int(memory.lengths[row]))
        mask = self._checked(self._select(view, keep), view, keep)
        name = table.group.name
        commit_compaction(memory, plan_compaction(memory, name, row, mask.cpu().numpy()))

    def _select(self, view: KVView, keep: int) -> object:
        """Ask the policy; whatever it raises is its request's business and nobody else's."""
        try:
            return self._policy.select(view, keep)
        except PolicyError:
            raise
        except Exception as error:
            name = type(self._policy).__name__
            raise PolicyError(f"policy {name} raised {type(error).__name__}: {error}") from error

    def _checked(self, mask: object, view: KVView, keep: int) -> Tensor:
        name, shape = type(self._policy).__name__, list(view.positions.shape)
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
