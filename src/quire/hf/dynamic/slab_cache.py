"""A slab as an ordinary Transformers cache, passed to the model's forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from quire.errors import ConfigError, UnsupportedModel
from quire.kv.dense.in_place import SlabRows
from quire.kv.dense.row import NOTHING
from quire.kv.dense.slab import DenseSlab


class SlabLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a slab."""

    is_sliding = False

    def __init__(self, slab: DenseSlab | SlabRows, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slab, self._layer = slab, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slab is already allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the forward's columns; return views of all columns in attention."""
        del args, kwargs
        return self._slab.append(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns in attention, and the index of the first."""
        return self._slab.window.width + query_length, 0

    def get_seq_length(self) -> int:
        """Columns before the forward."""
        return self._slab.window.width

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: rows are of different lengths."""
        del tokens_to_remove
        raise ConfigError("the cache of a DynamicBatch cannot be cropped")


class SlabCache(Cache):
    """All layers of a slab."""

    def __init__(self, slab: DenseSlab | SlabRows, num_layers: int) -> None:
        super().__init__(layers=[SlabLayer(slab, layer) for layer in range(num_layers)])


# ---- masks ---------------------------------------------------------------------------------------

# Attention masks of a slab, computed from logical positions, never from columns.
#
#     a query at position p attends to a slot of its row at position s if s <= p and, in a layer
#     with a window of W tokens, s > p - W
#
# The query of a pad or of an empty row has no visible slot. It attends to its own column, since
# the softmax of an empty set is NaN.

FULL, SLIDING = "full_attention", "sliding_attention"
_BOOLEAN, _ADDITIVE = "sdpa", "eager"

Masks = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The attention masks that a model needs.

    Attributes:
        kinds: kinds of the model's layers.
        by_kind: whether the model takes one mask for each kind of layer, or a single mask.
        window: window of sliding layers, in tokens.
    """

    kinds: frozenset[str]
    by_kind: bool
    window: int | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "MaskRule":
        """Read a config as `create_masks_for_generate` does.

        Raises:
            UnsupportedModel: layers of other kinds, whose state is not keys and values alone.
        """
        kinds = frozenset(get_layer_types_and_kwargs(config)[0])
        others = kinds - {FULL, SLIDING}
        if others:
            raise UnsupportedModel(
                f"expected layers of full or sliding attention, got {config.model_type} with "
                f"layers of {', '.join(sorted(others))}; use Transformers' own generate"
            )
        return cls(kinds, hasattr(config, "layer_types"), getattr(config, "sliding_window", None))

    def make(
        self,
        seen: Int[Tensor, "rows column"],
        new_columns: int,
        *,
        implementation: str,
        dtype: torch.dtype,
    ) -> Masks:
        """Masks [rows, 1, query, column] of a forward, True if a slot is visible.

        Args:
            seen: positions of the columns in attention, the forward's own at the end.
            new_columns: number of columns of the forward.
            implementation: attention implementation: sdpa uses booleans, eager adds values.
            dtype: type of the added values.
        """
        masks = {
            kind: _form(
                visible(seen, new_columns, self.window if kind == SLIDING else None),
                implementation,
                dtype,
            )
            for kind in self.kinds
        }
        return masks if self.by_kind else next(iter(masks.values()))


def visible(
    seen: Int[Tensor, "rows column"], new_columns: int, window: int | None
) -> Bool[Tensor, "rows 1 query column"]:
    """Whether each query attends to each slot."""
    query = seen[:, -new_columns:, None]
    slot = seen[:, None, :]
    found = (slot != NOTHING) & (slot <= query)
    if window is not None:
        found &= slot > query - window
    column = torch.arange(seen.shape[1], device=seen.device)
    own = column[None, :] == column[-new_columns:, None]
    return (found | ((query == NOTHING) & own))[:, None]


def _form(found: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    if implementation == _BOOLEAN:
        return found
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=found.device)
    return torch.where(found, hidden.new_zeros(()), hidden)


def check_implementation(name: str | None) -> str:
    """Return the attention implementation if its masks are supported.

    Raises:
        UnsupportedModel: the implementation is not supported.
    """
    if name not in (_BOOLEAN, _ADDITIVE):
        raise UnsupportedModel(
            f"expected attn_implementation sdpa or eager, which accept a mask per row, got {name}; "
            "load the model with attn_implementation='sdpa'"
        )
    return name
