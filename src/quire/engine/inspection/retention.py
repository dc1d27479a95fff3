"""The tokens of a running request that each of its lanes still retains."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.engine.pool import KVPool
from quire.kv.stored_positions import stored_positions
from quire.layout.pages import LaneGroup
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """Logical positions of the slots of one lane group.

    Attributes:
        group: the lane group.
        positions: [lanes, slots] in storage order; undefined past a lane's last slot.
        num_slots: [lanes] slots of each lane.
    """

    group: LaneGroup
    positions: NDArray[np.int32]
    num_slots: NDArray[np.int32]

    def mask(self, tokens: int) -> NDArray[np.bool_]:
        """Mask [lanes, tokens] of the retained tokens."""
        retained = np.zeros((len(self.positions), tokens), dtype=bool)
        live = np.arange(self.positions.shape[1]) < self.num_slots[:, None]
        live &= self.positions < tokens
        (index,) = np.nonzero(live.reshape(-1))
        lane = index // max(1, self.positions.shape[1])
        retained[lane, self.positions.reshape(-1)[index]] = True
        return retained


@dataclass(frozen=True, slots=True)
class Retention:
    """A copy of a request's tokens and of the positions in its lanes.

    Attributes:
        token_ids: its tokens: prompt and output so far.
        prompt_tokens: tokens of the prompt.
        num_computed: tokens whose KV was computed in this run; evicted ones count.
        groups: positions by lane group; empty while the request has no KV in the arena.
    """

    token_ids: list[int]
    prompt_tokens: int
    num_computed: int
    groups: tuple[GroupPositions, ...]

    @property
    def lanes(self) -> list[dict[str, object]]:
        """Layer and first and last KV head of every lane, in the order of `mask`."""
        return [lane for found in self.groups for lane in _lanes(found.group)]

    def mask(self) -> NDArray[np.bool_]:
        """Mask [lanes, computed tokens] of the retained tokens."""
        if not self.groups:
            return np.zeros((0, self.num_computed), dtype=bool)
        return np.concatenate([found.mask(self.num_computed) for found in self.groups])


def _lanes(group: LaneGroup) -> Iterator[dict[str, object]]:
    heads = group.page_class.heads
    for layer in group.layers:
        for lane in range(group.lanes_per_layer):
            first = lane * heads
            yield {
                "group": group.name,
                "layer": layer,
                "first_head": first,
                "last_head": first + heads - 1,
            }


def read_retention(pool: KVPool, request: Request) -> Retention:
    """Copy the tokens of an open request and the positions in its lanes.

    Args:
        pool: the KV memory of the engine.
        request: a request of the engine.
    """
    row = request.memory.row
    tables = pool.kv.memory.tables.values()
    groups = [table.group for table in tables if not table.group.private] if row >= 0 else []
    return Retention(
        token_ids=request.token_ids(0, request.num_tokens),
        prompt_tokens=len(request.prompt_token_ids),
        num_computed=request.progress.num_computed,
        groups=tuple(_read_group(pool, group, row) for group in groups),
    )


def _read_group(pool: KVPool, group: LaneGroup, row: int) -> GroupPositions:
    positions = stored_positions(pool.kv, group.name, row)
    if pool.offload is not None:
        tokens = group.page_class.tokens
        for pages in pool.offload.prefixes.page_groups(row):
            if pages.group == group.name and pages.positions is not None:
                first = pages.first * tokens
                positions[:, first : first + pages.columns * tokens] = pages.positions
    return GroupPositions(group, positions, pool.kv.memory.tables[group.name].num_slots[row].copy())
