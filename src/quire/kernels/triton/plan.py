"""Shapes of a step that its layers share, and the division of its rows among programs."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import LaneSlots, StepShape
from quire.kernels.device_copies import to_device
from quire.kernels.static_plan import StaticLanes

NO_WINDOW = 1 << 30
"""Window of layers without one: longer than any row, and its sum with a slot fits 32 bits."""

MAX_SPLITS = 64
ALIGNMENT = 4  # int32 numbers in 16 bytes: Triton compiles other kernels for other addresses
WAVES = 2  # programs of a kernel for each multiprocessor that hide each other's latency


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Blocks of queries of the rows with several tokens: [blocks] row, and first query in it."""

    rows: Int[Tensor, " block"]
    firsts: Int[Tensor, " block"]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step for layers with the same page class and equal lane lengths.

    Attributes:
        step, lanes: shapes on the host.
        page_tokens: slots of a page.
        slot_bytes: bytes of a slot, for the gathered backend.
        slots: [rows, lanes] live slots, on the device.
        starts: [rows] first token of each row.
        tokens: [rows] new tokens of each row.
        blocks: query blocks by their number of queries.
        gathered: plan of the gathered backend, once a layer needed it.
        most_slots: for a plan whose live slots change on the device, the most that a lane can have;
            `lanes` is then empty. None for a plan of one step.
    """

    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    slots: Int[Tensor, "row lane"]
    starts: Int[Tensor, " row"]
    tokens: Int[Tensor, " row"]
    blocks: dict[int, QueryBlocks] = field(default_factory=dict)
    gathered: list[object] = field(default_factory=list)
    most_slots: int | None = None

    @property
    def window(self) -> int:
        """The window, or `NO_WINDOW`."""
        return NO_WINDOW if self.lanes.window is None else self.lanes.window

    @property
    def longest(self) -> int:
        """Live slots of the fullest lane."""
        return self._longest_of(len(self.step.tokens))

    @property
    def longest_decode(self) -> int:
        """Most slots that a row with one new token attends to."""
        return min(self._longest_of(self.step.num_decode), self.window)

    def _longest_of(self, rows: int) -> int:
        if self.most_slots is not None:
            return self.most_slots
        return int(self.lanes.slots[:rows].max(initial=0))

    def query_blocks(self, queries: int) -> QueryBlocks:
        """Return the blocks of at most `queries` queries; copied to the device on first use."""
        blocks = self.blocks.get(queries)
        if blocks is None:
            rows, firsts = block_starts(self.step, queries)
            blocks = QueryBlocks(*on_device(self.slots.device, rows, firsts))
            self.blocks[queries] = blocks
        return blocks


def make_plan(
    step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int, device: torch.device
) -> TritonPlan:
    """Copy the shapes of a step to the device, in one copy."""
    slots, starts, tokens = on_device(device, lanes.slots, step.starts, step.tokens)
    return TritonPlan(step, lanes, page_tokens, slot_bytes, slots, starts, tokens)


def make_static_plan(
    step: StepShape, lanes: StaticLanes, page_tokens: int, slot_bytes: int
) -> TritonPlan:
    """Make a plan that reads the live slots from where the engine overwrites them."""
    starts, tokens = on_device(lanes.slots.device, step.starts, step.tokens)
    on_host = LaneSlots(np.zeros((0, lanes.slots.shape[1]), dtype=np.int32), lanes.window)
    return TritonPlan(
        step,
        on_host,
        page_tokens,
        slot_bytes,
        lanes.slots,
        starts,
        tokens,
        most_slots=lanes.most_slots,
    )


def on_device(device: torch.device, *arrays: NDArray[np.generic]) -> list[Tensor]:
    """Copy arrays to a device as int32, in one copy that the CPU does not wait for.

    Each of them starts at a multiple of 16 bytes.
    """
    starts = np.cumsum([0, *(-(-x.size // ALIGNMENT) * ALIGNMENT for x in arrays)])
    host = np.zeros(starts[-1], dtype=np.int32)
    for start, x in zip(starts, arrays, strict=False):
        host[start : start + x.size] = x.reshape(-1)
    flat = to_device(host, device)
    return [
        flat[start : start + x.size].view(x.shape)
        for start, x in zip(starts.tolist(), arrays, strict=False)
    ]


def block_starts(step: StepShape, queries: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide the rows after the decode rows into blocks of queries.

    Returns:
        Row and first query of each block. Blocks with the most keys are first within a row, so that
        the longest programs do not start last.
    """
    rows = np.arange(step.num_decode, len(step.tokens))
    counts = -(-step.tokens[rows].astype(np.int64) // queries)
    block = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.repeat(counts, counts) - 1
    return np.repeat(rows, counts), (last - block) * queries


def split_count(programs: int, blocks: int, multiprocessors: int) -> int:
    """Return the number of programs that share the slots of a row.

    One if rows and heads alone occupy the multiprocessors. Otherwise enough to occupy them, but no
    more than there are blocks of slots.

    Args:
        programs: programs without a split: rows times KV heads.
        blocks: blocks of slots of the longest row.
        multiprocessors: multiprocessors of the device.
    """
    wanted = -(-WAVES * multiprocessors // max(1, programs))
    return max(1, min(wanted, blocks, MAX_SPLITS)) if programs < multiprocessors else 1


def check_column_sums(plan: TritonPlan, heads: int, column_sums: Tensor | None) -> None:
    """Refuse column sums that are too small for the step."""
    wanted = (len(plan.step.tokens), heads, plan.longest)
    if column_sums is not None and (
        column_sums.shape[:2] != wanted[:2] or column_sums.shape[2] < wanted[2]
    ):
        raise InvariantError(
            f"expected column sums of shape {wanted} or wider, got {tuple(column_sums.shape)}"
        )
