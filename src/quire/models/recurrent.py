"""Recurrent layers of Transformers over states in pages.

A recurrent module takes one sequence per row, and reads and writes its states through the cache
protocol of Transformers. Its `forward` is replaced by one that cuts the flat batch: all decoding
rows run in one call, and each chunk of a prompt in one of its own. A decoding call changes the
states that it reads in place, so each call gets copies, which are written back after it.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.layout.model import CONV, RECURRENT_STATE
from quire.models.base import SequenceStates


class StateCache:
    """The cache of one call of a recurrent module; the methods are those of Transformers' `Cache`.

    Args:
        states: of the rows, by name; None where their sequences begin.
        dtype: of the module's inputs, in which convolutions and values of a token are stored;
            states of scans are in float32.
    """

    def __init__(self, states: Mapping[str, Tensor] | None, dtype: torch.dtype) -> None:
        self.states = {
            name: state.to(dtype) if name == CONV or state.ndim == 2 else state
            for name, state in (states or {}).items()
        }

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(CONV)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Append inputs of a convolution [rows, channels, tokens]; return all, padded if few."""
        known, kernel = self.states.get(CONV), conv_kernel_size or conv_states.shape[-1]
        whole = conv_states if known is None else torch.cat([known, conv_states], dim=-1)
        if known is None and whole.shape[-1] < kernel:
            whole = nn.functional.pad(whole, (kernel - whole.shape[-1], 0))
        self.states[CONV] = whole[..., -kernel:]
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(RECURRENT_STATE)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        self.states[RECURRENT_STATE] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module updates a recurrent state through the cache protocol."""
    forward = inspect.unwrap(type(module).forward)
    return "update_conv_state" in forward.__code__.co_names


_SCAN = "mamba_selective_scan"
_SCAN_TOKENS = 64  # whose states are computed together: [rows, channels, tokens, state] in memory


def selective_scan(
    inputs: Tensor,
    steps: Tensor,
    decay: Tensor,
    keys: Tensor,
    queries: Tensor,
    *,
    initial: Iterator[Tensor] | None,
    **options: Any,
) -> Any:
    """Mamba's selective scan, from a state; Transformers' own begins with zeros.

    Source: Gu and Dao 2023, arXiv 2312.00752, section 3.2; names as in its code.

    Args:
        inputs: [rows, channels, tokens].
        steps: [rows, channels, tokens], delta; `delta_bias` [channels] is added.
        decay: [channels, state], A: logarithms of what a step of 1 retains.
        keys: [rows, state, tokens], B.
        queries: [rows, state, tokens], C.
        initial: its next item is the state [rows, channels, state]; None: zeros.
        options: of Transformers' scan; `D` [channels] is a factor on inputs that are added to the
            outputs, and `z` [rows, channels, tokens] is a gate.

    Returns:
        [rows, channels, tokens]; with `return_last_state` also the last state, in float32.
    """
    if options.get("delta_bias") is not None:
        steps = steps + options["delta_bias"].to(steps.dtype)[..., None]
    if options.get("delta_softplus"):
        steps = nn.functional.softplus(steps)
    rows, channels, tokens = inputs.shape
    state = torch.zeros(rows, channels, decay.shape[1], device=inputs.device)
    if initial is not None:
        state = next(initial).float()
    outputs = []
    for start in range(0, tokens, _SCAN_TOKENS):
        at = slice(start, start + _SCAN_TOKENS)
        step = steps[..., at].transpose(1, 2).transpose(0, 1)[..., None]  # by token
        added = step * keys[..., at].permute(2, 0, 1)[:, :, None].float()
        added = added * inputs[..., at].permute(2, 0, 1)[..., None].float()
        retained = torch.exp(decay * step)
        for kept, new in zip(retained, added, strict=True):
            state = torch.addcmul(new, kept, state, out=new)
        read = queries[..., at].permute(2, 0, 1)[..., None]
        outputs.append((added.to(inputs.dtype) @ read).squeeze(-1).permute(1, 2, 0))
        state = added[-1].clone()
    out = torch.cat(outputs, dim=-1)
    if options.get("D") is not None:
        out = out + inputs * options["D"][:, None]
    if options.get("z") is not None:
        out = out * nn.functional.silu(options["z"])
    return (out, state) if options.get("return_last_state") else out


def continued(
    module: nn.Module, original: Callable[..., Any], inputs: Tensor, cache: StateCache | None
) -> Callable[..., Any]:
    """Return the forward of a module; a selective scan of several tokens begins with its state."""
    forward = inspect.unwrap(type(module).forward)
    if cache is None or inputs.shape[1] == 1 or _SCAN not in forward.__code__.co_names:
        return original
    state = cache.states.get(RECURRENT_STATE)
    by_head = None
    if state is not None:  # scans of several heads follow each other
        by_head = iter([state] if state.ndim == 3 else state.unbind(1))
    scan = partial(selective_scan, initial=by_head)
    scope = {**forward.__globals__, _SCAN: scan}
    own = types.FunctionType(forward.__code__, scope, argdefs=forward.__defaults__)
    return partial(own, module)


def run_recurrent(
    states: SequenceStates[Any] | None,
    layer: int,
    hidden: Tensor,
    run: Callable[[Tensor, StateCache | None], Tensor | tuple[Tensor, ...]],
) -> Tensor | tuple[Tensor, ...]:
    """Run a recurrent module on a flat batch.

    Args:
        states: of the batch's sequences; None: each token is a sequence of its own.
        layer: index of the module's layer.
        hidden: [1, tokens, elements].
        run: the module, of hidden states [rows, tokens, elements] and a cache; it returns a tensor
            or several [rows, tokens, ...].

    Returns:
        [1, tokens, ...], as the module does.
    """
    if states is None:
        alone = run(hidden.transpose(0, 1), None)
        if isinstance(alone, Tensor):
            return alone.transpose(0, 1)
        return tuple(each.transpose(0, 1) for each in alone)
    out: list[Tensor] = []
    several = False
    for part in states.parts:
        inputs = hidden[0, part.tokens].view(-1, part.length, hidden.shape[2])
        cache = StateCache(states.load(layer, part), hidden.dtype)
        found = run(inputs, cache)
        several = not isinstance(found, Tensor)
        results = (found,) if isinstance(found, Tensor) else found
        out = out or [each.new_zeros(1, hidden.shape[1], *each.shape[2:]) for each in results]
        for whole, each in zip(out, results, strict=True):
            whole[0, part.tokens] = each.flatten(0, 1)
        states.store(layer, part, cache.states)
    return tuple(out) if several else out[0]
