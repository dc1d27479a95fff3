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
        raise self._not_through_forward()

    def update(self, *arguments: object, **options: object) -> NoReturn:
        """Refused: keys and values are stored by Quire's attention."""
        del arguments, options
        raise self._not_through_forward()

    def _not_through_forward(self) -> ConfigError:
        self.require_open()
        return ConfigError(
            "this QuireCache works in model(...) and model.generate(...) of the model that it was "
            "created for; here it was passed to another model, or to a part of the model"
        )

    @property
    def is_croppable(self) -> bool:
        """False: evicted tokens cannot be recovered."""
        return False

    def activate_past_recording(self) -> NoReturn:
        """Refused: assisted decoding removes rejected tokens."""
        self.crop()

    def crop(self, *arguments: object, **options: object) -> NoReturn:
        """Refused: tokens evicted since then cannot be recovered."""
        del arguments, options
        raise UnsoundCombination(
            "assisted decoding and crop remove tokens, but evicted tokens cannot be recovered; "
            "generate without an assistant, or use a DynamicCache"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refused: two caches cannot own one memory."""
        raise UnsoundCombination(
            "a QuireCache cannot be copied; use batch_repeat_interleave to share a prompt"
        )
