"""Finds what a model's RoPE does to queries.

Nothing is read off names. One token is shown to the model at several positions with attention that
answers nothing, so that in each layer its queries differ by their rotation alone. Of the model's
rotary modules, in the ways there are to use them, the one that explains the difference is the
layer's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quire.models.base import AttentionCall, PagedAttention
from quire.models.rotary import Rotary

PROBED_POSITIONS = (0, 1, 5, 17)
MOST_ERROR = 0.05  # relative, of a rotation that explains what is seen; bfloat16 makes 0.005

Probe = Callable[[Sequence[int], PagedAttention], None]
"""Shows one token at these positions to the model, each a sequence of its own."""


def find_rotaries(model: nn.Module, probe: Probe) -> dict[int, Rotary]:
    """The rotation of each layer; layers that rotate in another way are absent.

    Args:
        model: a Transformers model.
        probe: runs it.
    """
    seen = _Queries()
    probe(PROBED_POSITIONS, seen)
    ways = list(_ways(model))
    found = {}
    for layer, queries in seen.by_layer.items():
        errors = [_error(way, queries) for way in ways]
        best = min(range(len(ways)), key=errors.__getitem__)
        if errors[best] < MOST_ERROR:
            found[layer] = ways[best]
    return found


class _Queries:
    """Attention that answers nothing and keeps what it was asked."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        self.by_layer[call.layer] = query.float()
        return torch.zeros_like(query)


def _ways(model: nn.Module) -> Iterator[Rotary]:
    """Every way to use every rotary module of a model, and not to rotate."""
    yield Rotary(None)
    for module in model.modules():
        if not any(name.endswith("inv_freq") for name in module._buffers):
            continue
        kinds = getattr(module, "rope_type", None)
        for kind in kinds if isinstance(kinds, Mapping) else (None,):
            for halves in (False, True):
                yield Rotary(module, kind, halves)


def _error(way: Rotary, queries: Tensor) -> float:
    """How far the queries of all positions are from the first one's, turned; relative."""
    positions = torch.tensor(PROBED_POSITIONS, device=queries.device)
    try:
        first = way.unrotate(queries[:1], positions[:1]).expand_as(queries)
        turned = way.rotate(first, positions)
    except (RuntimeError, TypeError):  # more numbers turn than a head has; another signature
        return float("inf")
    return float((turned - queries).norm() / queries.norm())


class Rotations:
    """Mean rotations of all layers, for rules that ask about queries to come.

    Args:
        rotaries: of each layer.
        head_dim: numbers of a query.
        device: where the model is.
        chosen: enters the frequencies of one kind of request.
    """

    def __init__(
        self,
        rotaries: Mapping[int, Rotary],
        head_dim: int,
        device: torch.device,
        chosen: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._rotaries, self._head_dim = rotaries, head_dim
        self._device, self._chosen = device, chosen

    def mean_rotation(
        self, layer: int, start: int, tokens: int
    ) -> Float[Tensor, "head_dim head_dim"]:
        """R for which R @ q is the mean of q rotated to `tokens` positions from `start` on.

        float32, with the factor on cosines and sines where a model has one.
        """
        with self._chosen(), torch.inference_mode():
            rotary = self._rotaries[layer]
            return rotary.mean_rotation(self._head_dim, start, tokens, self._device)
