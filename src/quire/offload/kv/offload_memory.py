"""Division of offload memory over KV and activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from quire.layout.pages import PAGE_ALIGNMENT_BYTES, LaneGroup
from quire.offload.recompute.activation_allocator import ActivationAllocator

_BLOCK_BYTES = 256 << 10  # contiguous activations of a layer
_MIN_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class OffloadMemory:
    """Sizes of the KV and the activations that share the offload memory.

    Attributes:
        groups: lane groups that can be offloaded.
        page_tokens: tokens of a page.
        row_bytes: bytes of a token's activations in one layer.
        num_layers: layers with activations.
    """

    groups: Sequence[LaneGroup]
    page_tokens: int
    row_bytes: int
    num_layers: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's activations in all layers."""
        return self.row_bytes * self.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of KV in every lane."""
        return sum(g.num_lanes * g.page_class.page_bytes for g in self.groups)

    def activation_bytes(self, fraction: float, total_bytes: int) -> int:
        """Bytes for activations, such that they and the KV run out together.

        Args:
            fraction: fraction (0 to 1) of the tokens with stored activations.
            total_bytes: size of offload memory.
        """
        return int(total_bytes * self._share(fraction))

    def min_bytes(self, fraction: float) -> int:
        """Smallest offload memory that holds a page of every lane, and of activations if any.

        Args:
            fraction: fraction (0 to 1) of the tokens with stored activations.
        """
        if not fraction:
            return self.page_bytes
        share, activation_bytes = self._share(fraction), self.page_tokens * self.token_bytes
        min_bytes = max(ceil(self.page_bytes / (1 - share)), ceil(activation_bytes / share))
        min_bytes = -(-min_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
        while self.activation_bytes(fraction, min_bytes) < activation_bytes:  # rounding
            min_bytes += PAGE_ALIGNMENT_BYTES
        return min_bytes

    def allocator(self, activation_bytes: int) -> ActivationAllocator | None:
        """Create the allocator of activation blocks; None if not one block fits."""
        page, tokens = self.page_tokens, activation_bytes // max(1, self.token_bytes)
        wanted = min(_BLOCK_BYTES // self.row_bytes, tokens // _MIN_BLOCKS)
        block = max(page, wanted // page * page)
        return ActivationAllocator(tokens // block, block, page) if tokens >= block else None

    def _share(self, fraction: float) -> float:
        """Fraction of offload memory for activations."""
        kv_bytes = sum(layer_bytes(g) * len(g.layers) for g in self.groups)
        return fraction * self.token_bytes / (fraction * self.token_bytes + kv_bytes)


def layer_bytes(group: LaneGroup) -> int:
    """Bytes of a token's KV in one layer of a group."""
    return group.page_class.slot_bytes * group.lanes_per_layer


def can_recompute(group: LaneGroup) -> bool:
    """Whether single slots of a group can be recomputed with identical contents."""
    page_class = group.page_class
    return group.lanes_per_layer == 1 and not page_class.per_page and page_class.rotated
