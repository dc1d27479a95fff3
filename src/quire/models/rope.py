"""Rotary frequencies that depend on a request's length, fixed for the whole of its life.

Transformers picks long-RoPE frequencies from the largest position of a batch, so in a flat batch
one long request would turn the keys of all the others. Here a request's regime follows from the
most tokens it may ever have, and a forward uses the regime it is told.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import InvariantError, UnsupportedModel

LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class _Frequencies:
    inverse: Tensor  # [rotary pairs], float32
    attention_scaling: float  # factor on cos and sin


@dataclass(frozen=True, slots=True)
class _RotaryModule:
    module: nn.Module
    prefix: str  # of its attributes: one set of frequencies for each kind of layer
    layer_type: str | None
    variants: tuple[_Frequencies, ...]  # short, long
    found: _Frequencies

    def select(self, variant: int) -> None:
        self._set(self.variants[variant], "default")

    def release(self) -> None:
        self._set(self.found, LONGROPE)

    def _set(self, frequencies: _Frequencies, rope_type: str) -> None:
        module: Any = self.module
        setattr(module, f"{self.prefix}inv_freq", frequencies.inverse)
        setattr(module, f"{self.prefix}attention_scaling", frequencies.attention_scaling)
        if self.layer_type is None:
            module.rope_type = rope_type
        else:
            module.rope_type = {**module.rope_type, self.layer_type: rope_type}


class RopeVariants:
    """The frequencies a model has to choose from, and the choice in force.

    Building it freezes the model's rotary modules: they no longer look at positions to choose their
    frequencies, until `release`.

    Args:
        model: a Transformers model on its final device.

    Raises:
        UnsupportedModel: the frequencies change with the length reached ("dynamic"), so keys that
            are already in pages would have to turn again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rotary: list[_RotaryModule] = []
        self._short_tokens: int | None = None
        for module in model.modules():
            for layer_type, rope_type in _rope_types(module):
                refuse_dynamic(rope_type)
                if rope_type == LONGROPE:
                    self._freeze(module, layer_type)
        self._current: int | None = None
        self.select(0)

    @property
    def count(self) -> int:
        """1, or 2 where short and long requests have different frequencies."""
        return 1 if self._short_tokens is None else 2

    def variant(self, final_tokens: int) -> int:
        """0 (short) up to the length the model was first trained for, 1 (long) beyond."""
        return int(self._short_tokens is not None and final_tokens > self._short_tokens)

    def select(self, variant: int) -> None:
        """Use these frequencies from now on.

        Raises:
            InvariantError: there is no such regime.
        """
        if not 0 <= variant < self.count:
            raise InvariantError(f"expected a RoPE regime below {self.count}, got {variant}")
        if variant == self._current:
            return
        for rotary in self._rotary:
            rotary.select(variant)
        self._current = variant

    def release(self) -> None:
        """Let the modules choose for themselves, as they were found, until the next `select`."""
        for rotary in self._rotary:
            rotary.release()
        self._current = None

    def _freeze(self, module: Any, layer_type: str | None) -> None:
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        short_tokens = int(parameters["original_max_position_embeddings"])
        if self._short_tokens not in (None, short_tokens):
            raise UnsupportedModel(
                f"layers disagree where long RoPE begins: {self._short_tokens} and {short_tokens}"
            )
        self._short_tokens = short_tokens
        prefix = "" if layer_type is None else f"{layer_type}_"
        variants = tuple(
            _longrope(module, prefix, layer_type, tokens)
            for tokens in (short_tokens, short_tokens + 1)
        )
        found = _Frequencies(
            getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")
        )
        self._rotary.append(_RotaryModule(module, prefix, layer_type, variants, found))


def refuse_dynamic(rope_type: str) -> None:
    """Raise UnsupportedModel for frequencies that change while a request grows."""
    if "dynamic" in rope_type:
        raise UnsupportedModel(
            f"RoPE type {rope_type!r} changes its frequencies as a request grows, so keys already "
            "in pages would be wrong; set yarn or linear scaling in config.json instead"
        )


def _rope_types(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        yield None, rope_type
    elif isinstance(rope_type, Mapping):
        yield from rope_type.items()


def _longrope(module: Any, prefix: str, layer_type: str | None, tokens: int) -> _Frequencies:
    device = getattr(module, f"{prefix}inv_freq").device
    options = {} if layer_type is None else {"layer_type": layer_type}
    inverse, scaling = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, device, tokens, **options)
    return _Frequencies(inverse, float(scaling))
