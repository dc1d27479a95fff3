"""Shows an attention how much it changed the residual stream of each layer.

In a layer `after = before + attention`, perhaps scaled or normalised first; `after` is what the
next part of the layer is given. Which part that is, is found out once by running the model: the
first one behind attention whose input differs from `before` by what attention gave. Layers that add
attention and MLP at once have none.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from quire.models.base import AttentionCall
from quire.models.bridge import BRIDGE_ATTRIBUTE, Bridge
from quire.models.rotations import PROBED_POSITIONS, Probe

MOST_ERROR = 0.02  # relative, of what attention gave times a factor, against what was added


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer: its number, the module, the name of its attention."""

    number: int
    module: nn.Module
    attention: str


@dataclass(slots=True)
class _Ran:
    """What the parts of a layer were given and gave, in the order they ran."""

    before: Tensor | None = None
    parts: list[tuple[str, Tensor, Tensor]] | None = None


def watch_shift(model: nn.Module, bridge: Bridge, probe: Probe) -> list[RemovableHandle] | None:
    """From now on tell every attention that wants it; None where a layer cannot be watched.

    An attention that has `wants_shift` is told `note_shift(layer, cosines)` for each layer, the
    cosine between the residual stream before and after for each token, float32.
    """
    layers = list(_layers(model))
    ran = _run(layers, probe)
    next_parts = [_next_part(layer, run) for layer, run in zip(layers, ran, strict=True)]
    handles: list[RemovableHandle] = []
    if None in next_parts:
        return None
    for layer, part in zip(layers, next_parts, strict=True):
        assert part is not None, "all were found"
        handles += _watch(layer, part, bridge)
    return handles


def _layers(model: nn.Module) -> Iterator[_Layer]:
    for name, module in model.named_modules():
        if hasattr(module, BRIDGE_ATTRIBUTE) and "Attention" in type(module).__name__:
            parent, _, own = name.rpartition(".")
            number: Any = module.layer_idx
            yield _Layer(int(number), model.get_submodule(parent), own)


def _run(layers: list[_Layer], probe: Probe) -> list[_Ran]:
    """Run the model once and note what each layer's parts were given."""
    notes, handles = [], []
    for layer in layers:
        note = _Ran(parts=[])
        notes.append(note)
        handles.append(layer.module.register_forward_pre_hook(_note_before(note), with_kwargs=True))
        handles += [
            part.register_forward_hook(_note_part(note, name), with_kwargs=True)
            for name, part in layer.module.named_children()
        ]
    try:
        probe(PROBED_POSITIONS, _Answering())
    finally:
        for handle in handles:
            handle.remove()
    return notes


class _Answering:
    """Attention that gives something else for each token, so that what it adds can be told."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        return query + 1


def _note_before(note: _Ran) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note.before = _stream(args, kwargs).clone()

    return hook


def _note_part(note: _Ran, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        first = given[0] if isinstance(given, tuple) else given
        assert note.parts is not None, "made for a run"
        if isinstance(first, Tensor):
            flat = first.reshape(-1, first.shape[-1])
            note.parts.append((name, _stream(args, kwargs).clone(), flat.clone()))

    return hook


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states a module is given, [tokens, hidden]."""
    given = args[0] if args else kwargs["hidden_states"]
    assert isinstance(given, Tensor), "modules of a layer take hidden states first"
    return given.reshape(-1, given.shape[-1])


def _next_part(layer: _Layer, ran: _Ran) -> str | None:
    """The part that is given the residual stream after attention was added."""
    parts, before = ran.parts or [], ran.before
    names = [name for name, _, _ in parts]
    if before is None or layer.attention not in names:
        return None
    at = names.index(layer.attention)
    added = [parts[at][2]]  # what attention gave, and what a norm made of it
    for name, given, made in parts[at + 1 :]:
        if given.shape != before.shape:
            continue
        # attention may be so much larger than the stream that both look alike: the better one is it
        alone, onto_stream = _error(added[0], given), min(_error(x, given - before) for x in added)
        if onto_stream <= min(MOST_ERROR, alone):
            return name
        if alone <= MOST_ERROR:
            added.append(made)
    return None


def _error(given: Tensor, seen: Tensor) -> float:
    """How much of what is seen is not what was given times a factor, relative."""
    if given.shape != seen.shape or not seen.any():
        return math.inf
    x, y = given.float().flatten(), seen.float().flatten()
    return float((y - x * (x @ y / (x @ x))).norm() / y.norm())


def _watch(layer: _Layer, part: str, bridge: Bridge) -> list[RemovableHandle]:
    held: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held.clear()
        if getattr(bridge.attention, "wants_shift", False):
            held.append(_stream(args, kwargs))

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if held:
            attention: Any = bridge.attention
            before, after = held.pop().float(), _stream(args, kwargs).float()
            attention.note_shift(layer.number, F.cosine_similarity(before, after, dim=-1))

    child = layer.module.get_submodule(part)
    return [
        layer.module.register_forward_pre_hook(keep, with_kwargs=True),
        child.register_forward_pre_hook(tell, with_kwargs=True),
    ]
