"""RoPE of a model: frequencies fixed for the lifetime of a request, and the rotation of queries.

Transformers selects long-RoPE frequencies by the largest position of a batch. In a flat batch, one
long request would then change the keys of all others. Here the RoPE scaling variant of a request
follows from its maximum number of tokens, and each forward is passed the variant to use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import InvariantError, UnsupportedModel
from quire.kernels.latent import LatentHeads, TiedHeads
from quire.models.base import AttentionCall, OwnValue, PagedAttention
from quire.models.rotary import Rotary

# Rotary frequencies that depend on a request's final length, fixed for its lifetime.

LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class _Frequencies:
    inverse: Tensor  # [rotary pairs], float32
    attention_scaling: float  # factor on cos and sin


@dataclass(frozen=True, slots=True)
class _RotaryModule:
    module: nn.Module
    prefix: str  # prefix of its attributes: one set of frequencies for each kind of layer
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
    """The RoPE scaling variants of a model, and the variant in use.

    The constructor freezes the model's rotary modules: until `release` they no longer select their
    frequencies by position.

    Raises:
        UnsupportedModel: the frequencies change with the current length ("dynamic"), so cached
            keys would have to be rotated again.
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
        """Number of variants: 1, or 2 if short and long requests have different frequencies."""
        return 1 if self._short_tokens is None else 2

    def variant(self, final_tokens: int) -> int:
        """The variant: 0 (short) up to the model's original context length, 1 (long) beyond."""
        return int(self._short_tokens is not None and final_tokens > self._short_tokens)

    def select(self, variant: int) -> None:
        """Use the frequencies of this variant until the next `select` or `release`."""
        if not 0 <= variant < self.count:
            raise InvariantError(f"expected a RoPE variant below {self.count}, got {variant}")
        if variant == self._current:
            return
        for rotary in self._rotary:
            rotary.select(variant)
        self._current = variant

    def release(self) -> None:
        for rotary in self._rotary:
            rotary.release()
        self._current = None

    def _freeze(self, module: Any, layer_type: str | None) -> None:
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        short_tokens = int(parameters["original_max_position_embeddings"])
        if self._short_tokens not in (None, short_tokens):
            raise UnsupportedModel(
                "expected one original_max_position_embeddings for all layers, got "
                f"{self._short_tokens} and {short_tokens}"
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


# Finds the RoPE that a model applies to queries.
#
# Module names are not used. The model runs on one token at several positions with attention that
# returns zeros, so that in each layer the queries differ by their rotation alone. A candidate is a
# rotary module with a layer type and a layout of its output. The layer's RoPE is the candidate that
# reproduces this difference.

PROBED_POSITIONS = (0, 1, 5, 17)
MAX_ERROR = 0.05  # maximum relative error of a matching rotation; about 0.005 in bfloat16

Probe = Callable[[Sequence[int], PagedAttention], None]
"""Runs the model on one token at each of these positions, each in a separate sequence."""


def find_rotaries(model: nn.Module, probe: Probe) -> dict[int, Rotary]:
    """The RoPE of each layer; layers with an unknown rotation are absent."""
    seen = _Queries()
    probe(PROBED_POSITIONS, seen)
    candidates = list(_candidates(model))
    found = {}
    for layer, queries in seen.by_layer.items():
        elements = seen.elements.get(layer)
        own = [
            replace(candidate, elements=elements)
            for candidate in candidates
            # Llama 4 also scales queries by positions beyond the probed ones
            if layer in seen.latent or not candidate.neighbours
        ]
        errors = [_error(candidate, queries) for candidate in own]
        best = min(range(len(own)), key=errors.__getitem__)
        if errors[best] < MAX_ERROR:
            found[layer] = own[best]
    return found


class _Queries(OwnValue):
    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}
        self.latent = set[int]()
        self.elements: dict[int, Tensor] = {}  # of a head that keys store

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # of latents, the key is the rotated part; the rest of a query is not rotated
        self.by_layer[call.layer] = (query if call.latent is None else key).float()
        if isinstance(call.latent, LatentHeads):
            self.latent.add(call.layer)
        if isinstance(call.latent, TiedHeads):
            self.elements[call.layer] = call.latent.rotated
        return torch.zeros_like(super().attend(call, query, key, value))


def _candidates(model: nn.Module) -> Iterator[Rotary]:
    """Yield no rotation, and each rotary module with each layer type and layout."""
    yield Rotary(None)
    for module in model.modules():
        if not any(name.endswith("inv_freq") for name in module._buffers):
            continue
        kinds = getattr(module, "rope_type", None)
        for kind in kinds if isinstance(kinds, Mapping) else (None,):
            for halves in (False, True):
                yield Rotary(module, kind, halves)
            yield Rotary(module, kind, neighbours=True)


def _error(candidate: Rotary, queries: Tensor) -> float:
    """Relative error of the first position's query, rotated to all positions, against `queries`."""
    positions = torch.tensor(PROBED_POSITIONS, device=queries.device)
    try:
        first = candidate.unrotate(queries[:1], positions[:1]).expand_as(queries)
        rotated = candidate.rotate(first, positions)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        # more rotary elements than head_dim, another signature, or no complex numbers
        return float("inf")
    return float((rotated - queries).norm() / queries.norm())


class Rotations:
    """Mean rotations of all layers, for eviction rules that predict future queries."""

    def __init__(
        self,
        rotaries: Mapping[int, Rotary],
        head_dims: Sequence[int],
        device: torch.device,
        select_frequencies: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._rotaries, self._head_dims = rotaries, head_dims
        self._device, self._select_frequencies = device, select_frequencies

    def mean_rotation(
        self, layer: int, positions: Sequence[int]
    ) -> Float[Tensor, "head_dim head_dim"]:
        """Matrix R: R @ q is the mean of q rotated to some positions.

        R is float32 and includes the model's factor on cosines and sines, if the model has one.
        """
        with self._select_frequencies(), torch.inference_mode():
            rotary = self._rotaries[layer]
            return rotary.mean_rotation(self._head_dims[layer], positions, self._device)
