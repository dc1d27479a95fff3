"""The parts of Transformers' cache interface that paged KV does not support."""

from abc import abstractmethod
from typing import NoReturn

from transformers.cache_utils import Cache

from quire.errors import ConfigError, UnsoundCombination


class CacheWithoutLayers(Cache):
    """A `Cache` without layers of tensors: keys and values are not returned."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @abstractmethod
    def require_open(self) -> None:
        """Raise ConfigError if the cache is closed."""

    @property
    def is_linear(self) -> list[bool]:
        """No linear attention: all tokens are cached, and `generate` passes only the new ones.

        Transformers 5.24 reads it; an empty list would mean that all layers are linear.
        """
        return [False]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum length."""
        del layer_idx
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The older name of `get_max_length`."""
        del layer_idx
        return -1

    def get_mask_sizes(self, query_length: object, layer_idx: int = 0) -> NoReturn:
        """Refused: paged attention needs no mask."""
        del query_length, layer_idx
        raise self._wrong_call()

    def update(self, *arguments: object, **options: object) -> NoReturn:
        """Refused: keys and values are stored by Quire's attention."""
        del arguments, options
        raise self._wrong_call()

    def _wrong_call(self) -> ConfigError:
        self.require_open()
        return ConfigError(
            "a QuireCache works only in model(...) and model.generate(...) of the model it was "
            "created for; it was passed to another model or to a submodule"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refused: two caches cannot own one memory."""
        raise UnsoundCombination(
            "a QuireCache cannot be copied; use batch_repeat_interleave to share a prompt"
        )
