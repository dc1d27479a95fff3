"""A slab as Transformers sees it: an ordinary cache, handed over as `past_key_values`."""

from typing import NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from quire.errors import ConfigError
from quire.kv.dense.in_place import SlabRows
from quire.kv.dense.slab import DenseSlab


class SlabLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a slab."""

    is_sliding = False

    def __init__(self, slab: DenseSlab | SlabRows, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slab, self._layer = slab, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the slab was made before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the forward's columns; return views of all that it sees."""
        del args, kwargs
        return self._slab.append(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that are seen, and which is the first."""
        return self._slab.window.width + query_length, 0

    def get_seq_length(self) -> int:
        """Columns before the forward."""
        return self._slab.window.width

    def get_max_length(self) -> int:
        """-1: none."""
        return -1

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: rows are of different lengths."""
        del tokens_to_remove
        raise ConfigError("a DynamicBatch drives its model itself; nothing can be cropped")


class SlabCache(Cache):
    """All layers of a slab."""

    def __init__(self, slab: DenseSlab | SlabRows, num_layers: int) -> None:
        super().__init__(layers=[SlabLayer(slab, layer) for layer in range(num_layers)])
