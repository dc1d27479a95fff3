"""Recurrent layers of Transformers over states in pages.

A recurrent module takes one sequence per row, and reads and writes its states through the cache
protocol of Transformers. Its `forward` is replaced by one that cuts the flat batch: all decoding
rows run in one call, and each chunk of a prompt in one of its own. A decoding call changes the
states that it reads in place, so each call gets copies, which are written back after it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.layout.model import CONV, RECURRENT_STATE
from quire.models.base import SequenceStates


class StateCache:
    """The cache of one call of a recurrent module; the methods are those of Transformers' `Cache`.

    Args:
        states: of the rows, by name; None where their sequences begin.
        dtype: of the module's inputs, in which convolutions store theirs.
    """

    def __init__(self, states: Mapping[str, Tensor] | None, dtype: torch.dtype) -> None:
        self.states = dict(states or {})
        if CONV in self.states:
            self.states[CONV] = self.states[CONV].to(dtype)

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


def run_recurrent(
    states: SequenceStates[Any] | None,
    layer: int,
    hidden: Tensor,
    run: Callable[[Tensor, StateCache | None], Tensor],
) -> Tensor:
    """Run a recurrent module on a flat batch.

    Args:
        states: of the batch's sequences; None: each token is a sequence of its own.
        layer: index of the module's layer.
        hidden: [1, tokens, elements].
        run: the module, of hidden states [rows, tokens, elements] and a cache.

    Returns:
        [1, tokens, elements]
    """
    if states is None:
        return run(hidden.transpose(0, 1), None).transpose(0, 1)
    out = torch.zeros_like(hidden)
    for part in states.parts:
        inputs = hidden[0, part.tokens].view(-1, part.length, hidden.shape[2])
        cache = StateCache(states.load(layer, part), hidden.dtype)
        out[0, part.tokens] = run(inputs, cache).flatten(0, 1)
        states.store(layer, part, cache.states)
    return out
