"""What Transformers may ask of a cache and pages do not answer."""

from abc import abstractmethod
from typing import NoReturn

from transformers.cache_utils import Cache

from quire.errors import ConfigError, UnsoundCombination


class CacheWithoutLayers(Cache):
    """A `Cache` that has no layers of tensors: keys and values are not handed out."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @abstractmethod
    def require_open(self) -> None:
        """Refuse to be used after it was closed."""

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no longest sequence."""
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
        """Refused: keys and values arrive through Quire's attention, with the queries."""
        del arguments, options
        raise self._not_through_forward()

    def _not_through_forward(self) -> ConfigError:
        self.require_open()
        return ConfigError(
            "this QuireCache works in model(...) and model.generate(...) of the model it was made "
            "for; here another model, or a part of it, was given it"
        )

    @property
    def is_croppable(self) -> bool:
        """False: evicted tokens do not come back."""
        return False

    def activate_past_recording(self) -> NoReturn:
        """Refused: assisted decoding takes tokens back."""
        self.crop()

    def crop(self, *arguments: object, **options: object) -> NoReturn:
        """Refused: tokens that were evicted meanwhile do not come back."""
        del arguments, options
        raise UnsoundCombination(
            "assisted decoding and crop take tokens back, but what was evicted since then is gone; "
            "generate without an assistant, or use a DynamicCache"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refused: two caches cannot own one memory."""
        raise UnsoundCombination(
            "a QuireCache cannot be copied; batch_repeat_interleave shares a prompt among rows"
        )
