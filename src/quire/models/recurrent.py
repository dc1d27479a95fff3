"""Recurrent layers of Transformers over states in pages.

A recurrent module takes one sequence per row, and reads and writes its states through the cache
protocol of Transformers. Its `forward` is replaced by one that cuts the flat batch: all decoding
rows run in one call, and each chunk of a prompt in one of its own. A decoding call changes the
states that it reads in place, so each call gets copies, which are written back after it. On a CPU,
functions of the C library replace those of the same name that the forward calls. They change the
states of decoding rows in their pages.

With `TokenByToken` a module decodes every token, also of a prompt, and only the updates of states
follow each other:

    projections, gates, norms    of all tokens in one call, [tokens, 1, elements]
    convolution, recurrence      the module's own update of one token, token by token

Both have the same shapes in every batch, so that a token's bits depend on no other sequence and on
no chunk.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.native.arguments import PLAIN
from quire.kernels.native.library import NotLoaded
from quire.kernels.native.recurrent import IN_PLACE, PagedState, RecurrentUpdates
from quire.kernels.native.self_test import tested_library
from quire.layout.model import CONV, RECURRENT_STATE
from quire.models.base import SequenceStates, StatesFromZeros, TokenByToken


class StateCache:
    """The cache of one call of a recurrent module; the methods are those of Transformers' `Cache`.

    Args:
        states: of the rows, by name; None where their sequences begin.
        dtype: of the module's inputs, in which convolutions and values of a token are stored;
            states of scans are in float32.
    """

    def __init__(
        self, states: Mapping[str, Tensor] | Mapping[str, PagedState] | None, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        # a state in pages is passed on to a function of the C library
        self.states: dict[str, Any] = {
            name: state.to(dtype) if name == CONV or len(state.shape) == 2 else state
            for name, state in (states or {}).items()
        }

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
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

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.states.get(RECURRENT_STATE)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0
    ) -> Any:
        self.states[RECURRENT_STATE] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return MiniMax's state, which its module computes in the type of its inputs."""
        state = self.states.get(RECURRENT_STATE)
        return None if state is None else state.to(self.dtype)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.states[RECURRENT_STATE] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


_UPDATE = re.compile(r"causal_conv1d_update|\w*selective_state_update|\w*recurrent\w*_delta_\w+")
"""Functions of Transformers' modules that update a state by one token of each row."""

_UPDATED = ("conv_state", "state", "initial_state")
_WEIGHTS = frozenset({"weight", "bias", "A", "D", "dt_bias"})
"""Their arguments: the state, and those that are not by row."""


class TokenCache(StateCache):
    """The cache of a decoding call whose rows are tokens of sequences, several of each.

    Args:
        states: [sequences, *shape], by name.
        dtype: as in `StateCache`.
        order: row and sequence of each token; tokens of a sequence in their order.
        rounded: see `StatesFromZeros.rounded`.
    """

    def __init__(
        self,
        states: Mapping[str, Tensor],
        dtype: torch.dtype,
        order: list[tuple[int, int]],
        rounded: Callable[[str, Tensor], Tensor],
    ) -> None:
        super().__init__(states, dtype)
        self._order, self._rounded = order, rounded

    def update(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of `_UPDATE` for one token after the other.

        Rows without a token return zeros.
        """
        call = inspect.signature(function).bind(*args, **options)
        rows = {
            name: value
            for name, value in call.arguments.items()
            if isinstance(value, Tensor) and name not in _WEIGHTS
        }
        argument = next(name for name in _UPDATED if name in rows)
        states, out = rows.pop(argument), None
        name, seen = CONV if argument == "conv_state" else RECURRENT_STATE, set[int]()
        for row, sequence in self._order:
            state = states[sequence : sequence + 1]
            if sequence in seen and (rounded := self._rounded(name, state)) is not state:
                state.copy_(rounded)  # as if the token before it had been in another step
            seen.add(sequence)
            one = {name: value[row : row + 1].clone() for name, value in rows.items()}
            call.arguments.update(one, **{argument: state})
            found = function(*call.args, **call.kwargs)
            if isinstance(found, tuple):
                found, new = found
                state.copy_(new)
            if out is None:
                out = found.new_zeros(len(next(iter(rows.values()))), *found.shape[1:])
            out[row] = found[0]
        return (out, states) if argument == "initial_state" else out


def why_not_by_token(model: nn.Module) -> str | None:
    """Return why a model's recurrent layers cannot run with `TokenByToken`; None: they can."""
    for module in filter(is_recurrent, model.modules()):
        names = inspect.unwrap(type(module).forward).__code__.co_names
        if not any(map(_UPDATE.fullmatch, names)):
            return f"{type(module).__name__} has no function that updates its state by one token"
    return None


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module updates a recurrent state through a cache."""
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return "update_conv_state" in names or is_lightning(module)


def is_lightning(module: nn.Module) -> bool:
    """Whether a module is MiniMax's attention with a state; it returns the state beside outputs."""
    return "set_linear_cache" in inspect.unwrap(type(module).forward).__code__.co_names


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
    """Return the forward of a module with functions of the C library.

    A selective scan of several tokens begins with its state.
    """
    forward = _forward(type(module))
    if isinstance(cache, TokenCache):
        names = filter(_UPDATE.fullmatch, forward.__code__.co_names)
        updates = {name: partial(cache.update, forward.__globals__[name]) for name in names}
        return _with_globals(module, forward, updates)
    functions = _native_functions(forward)
    if cache is not None and inputs.shape[1] > 1 and _SCAN in forward.__code__.co_names:
        state = cache.states.get(RECURRENT_STATE)
        by_head = None
        if state is not None:  # scans of several heads follow each other
            by_head = iter([state] if state.ndim == 3 else state.unbind(1))
        functions = {**functions, _SCAN: partial(selective_scan, initial=by_head)}
    return _with_globals(module, forward, functions) if functions else original


def _with_globals(
    module: nn.Module, forward: Any, replaced: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the forward of a module with other functions of its file."""
    scope = {**forward.__globals__, **replaced}
    own = types.FunctionType(forward.__code__, scope, argdefs=forward.__defaults__)
    return partial(own, module)


def _forward(of: type[nn.Module]) -> Any:
    return inspect.unwrap(of.forward)


@functools.cache
def _native_functions(forward: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of the C library for those that a forward calls, by name."""
    library = tested_library()
    if isinstance(library, NotLoaded) or library.path == PLAIN:
        return {}
    names = forward.__globals__.keys() & set(forward.__code__.co_names)
    called = {name: forward.__globals__[name] for name in names}
    return RecurrentUpdates(library).replacements(called)


def _paged(
    states: SequenceStates[Any], layer: int, part: Any, module: nn.Module
) -> Mapping[str, PagedState] | None:
    """Return the states of decoding rows in their pages, if C functions update all of them."""
    functions = IN_PLACE & _native_functions(_forward(type(module))).keys()
    found = states.in_pages(layer, part) if part.length == 1 and functions else None
    return found if found is not None and len(found) == len(functions) else None


def run_recurrent(
    module: nn.Module,
    states: SequenceStates[Any] | TokenByToken | None,
    layer: int,
    hidden: Tensor,
    run: Callable[[Tensor, StateCache | None], Tensor | tuple[Tensor, ...]],
) -> Tensor | tuple[Tensor, ...]:
    """Run a recurrent module on a flat batch.

    Args:
        module: the module.
        states: of the batch's sequences; None: each token is a sequence of its own.
        layer: index of the module's layer.
        hidden: [1, tokens, elements].
        run: runs the module, of hidden states [rows, tokens, elements] and a cache; it returns a
            tensor or several [rows, tokens, ...].

    Returns:
        [1, tokens, ...], as the module does.
    """
    if states is None:
        alone = run(hidden.transpose(0, 1), None)
        if isinstance(alone, Tensor):
            return alone.transpose(0, 1)
        return tuple(each.transpose(0, 1) for each in alone)
    if isinstance(states, TokenByToken):
        return _run_by_token(states.states, layer, hidden, run)
    out: list[Tensor] = []
    several = False
    parts = states.parts
    for part in parts:
        inputs = hidden[0] if len(parts) == 1 else hidden[0, part.tokens]
        paged = _paged(states, layer, part, module)
        cache = StateCache(paged or states.load(layer, part), hidden.dtype)
        found = run(inputs.view(-1, part.length, hidden.shape[2]), cache)
        several = not isinstance(found, Tensor)
        results = (found,) if isinstance(found, Tensor) else found
        if paged is None:
            states.store(layer, part, cache.states)
        if len(parts) == 1:
            out = [each.reshape(1, hidden.shape[1], *each.shape[2:]) for each in results]
            break
        out = out or [each.new_zeros(1, hidden.shape[1], *each.shape[2:]) for each in results]
        for whole, each in zip(out, results, strict=True):
            whole[0, part.tokens] = each.flatten(0, 1)
    return tuple(out) if several else out[0]


def _run_by_token(
    states: StatesFromZeros[Any],
    layer: int,
    hidden: Tensor,
    run: Callable[[Tensor, StateCache | None], Tensor | tuple[Tensor, ...]],
) -> Tensor | tuple[Tensor, ...]:
    order: list[tuple[int, int]] = []
    begins = [0]
    for part in states.parts:
        rows = part.tokens.tolist()
        order += ((row, begins[-1] + n // part.length) for n, row in enumerate(rows))
        begins.append(begins[-1] + len(rows) // part.length)
    loaded = [states.begun(layer, part) for part in states.parts]
    together = {name: torch.cat([each[name] for each in loaded]) for name in loaded[0]}
    cache = TokenCache(together, hidden.dtype, order, partial(states.rounded, layer))
    found = run(hidden.transpose(0, 1), cache)
    for part, begin, end in zip(states.parts, begins, begins[1:], strict=False):
        after = {name: state[begin:end] for name, state in cache.states.items()}
        states.store(layer, part, after)
    if isinstance(found, Tensor):
        return found.transpose(0, 1)
    return tuple(each.transpose(0, 1) for each in found)
