"""Updates of recurrent states in C, in the pages that hold the states, or in tensors.

They have the arguments of these functions of Transformers' models, by which they are tested. All go
from token to token with a part of the state in registers or in the first cache: on a CPU this takes
less time than products of chunks of tokens.

    causal_conv1d_update                a causal convolution, one token
    torch_recurrent_gated_delta_rule    the gated delta rule: Yang et al. 2024, arXiv 2412.06464
    torch_chunk_gated_delta_rule
    recurrent_kimi_delta_attention      the same with a decay for each channel: arXiv 2510.26692
    chunk_kimi_delta_attention
    mamba2_selective_state_update       Mamba 2: Dao and Gu 2024, arXiv 2405.21060
    mamba2_chunk_scan
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.native.arguments import (
    DTYPES,
    ConvolveArgs,
    DeltaArgs,
    RowNumbers,
    SpaceArgs,
    StatesArgs,
)
from quire.kernels.native.library import NativeLibrary

MAX_DIM = 512  # of a head: MAX_HEAD_DIM of args.h
IN_PLACE = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
    }
)
"""Functions that also take states in pages; each has one kind of state."""
_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class PagedState:
    """A state of some rows, in their pages.

    Attributes:
        plane: of all pages, in float32.
        pages: of each row; its vectors (along the last dimension of the state) are divided equally
            among them, in order. Contiguous.
        shape: of the state of a row.
    """

    plane: Float[Tensor, "page vectors 1 elements"]
    pages: Int[Tensor, "row count"]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, state: Tensor) -> "PagedState":
        """Return a contiguous tensor [rows, *shape] as a state of which each row is a page."""
        rows, *shape = state.shape
        pages = torch.arange(rows)[:, None]
        return cls(state.view(rows, -1, 1, shape[-1]), pages, tuple(shape))

    def load(self) -> Tensor:
        """Return a copy [rows, *shape]."""
        return self.plane[self.pages, :, 0].reshape(len(self.pages), *self.shape)

    def store(self, state: Tensor) -> None:
        """Overwrite the state."""
        flat = state.reshape(*self.pages.shape, -1, self.shape[-1])
        self.plane[self.pages, :, 0] = flat.to(self.plane.dtype)

    def to(self, *_args: object) -> "PagedState":
        """Return itself: some modules convert the state that an update returns."""
        return self

    @property
    def args(self) -> StatesArgs:
        """For the C library."""
        plane, pages = self.plane, self.pages
        page_bytes = plane.stride(0) * plane.element_size()
        counts = pages.shape[1], plane.shape[1]
        return StatesArgs(plane.data_ptr(), pages.data_ptr(), page_bytes, *counts)


class RecurrentUpdates:
    """Functions to be used in place of those of Transformers.

    Arguments that the C library cannot read are left to Transformers' function, with copies of
    states in pages.

    Args:
        library: the loaded C library, with code for a path other than plain C.
        path: code path; None: the best of this CPU.
    """

    def __init__(self, library: NativeLibrary, path: int | None = None) -> None:
        self._library = library
        self._path = library.path if path is None else path

    def replacements(self, functions: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
        """Return the replacement of each function by its name.

        Args:
            functions: Transformers' functions by name, and others.
        """
        own: dict[str, Callable[..., Any]] = {
            "causal_conv1d_update": self.convolve,
            "torch_recurrent_gated_delta_rule": self.delta_rule,
            "torch_chunk_gated_delta_rule": self.delta_rule,
            "recurrent_kimi_delta_attention": self.delta_rule,
            "chunk_kimi_delta_attention": self.delta_rule,
            "mamba2_selective_state_update": self.selective_state,
            "mamba2_chunk_scan": self.scan,
        }
        return {name: partial(own[name], functions[name]) for name in own.keys() & functions}

    def convolve(
        self,
        original: Callable[..., Any],
        hidden_states: Float[Tensor, "row channel 1"],
        conv_state: PagedState | Tensor,
        weight: Float[Tensor, "channel tap"],
        bias: Float[Tensor, " channel"] | None = None,
        activation: str | None = None,
    ) -> Float[Tensor, "row channel 1"]:
        """Convolve the newest inputs of each channel; see `causal_conv1d_update`."""
        if isinstance(conv_state, Tensor):
            found: Tensor = original(hidden_states, conv_state, weight, bias, activation)
            return found
        channels, length = conv_state.shape
        rows, taps, x = len(hidden_states), weight.shape[1], hidden_states.transpose(1, 2)
        if not _fits(x) or taps > length or activation not in (None, *_SILU):
            state = conv_state.load().to(x.dtype)
            found = original(hidden_states, state, weight, bias, activation)
            conv_state.store(state)
            return found
        x, weight = _by_token(x), weight.float().contiguous()
        bias = None if bias is None else bias.float()
        out = x.new_empty(rows, channels)
        args = ConvolveArgs(
            states=conv_state.args,
            x=_numbers(x),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            channels=channels,
            length=length,
            taps=taps,
            silu=activation in _SILU,
            path=self._path,
        )
        self._library.convolve(ctypes.byref(args), self._library.parallel_for)
        return out[..., None]

    def delta_rule(  # noqa: PLR0913 - arguments of Transformers
        self,
        original: Callable[..., Any],
        query: Float[Tensor, "row token key_head key_dim"],
        key: Float[Tensor, "row token key_head key_dim"],
        value: Float[Tensor, "row token head value_dim"],
        g: Float[Tensor, "row token head *decay"],
        beta: Float[Tensor, "row token head"],
        initial_state: PagedState | Tensor | None = None,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Float[Tensor, "row token head value_dim"], PagedState | Tensor | None]:
        """Update by the gated delta rule; see `torch_recurrent_gated_delta_rule`."""
        normalize, (rows, tokens, heads, value_dim) = use_qk_l2norm_in_kernel, value.shape
        key_dim, inputs = key.shape[3], (query, key, value, g, beta)
        if not all(map(_fits, inputs)) or max(key_dim, value_dim) > MAX_DIM:
            options |= {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": normalize}
            options["initial_state"] = initial_state
            if isinstance(initial_state, PagedState):
                options["initial_state"] = initial_state.load()
            found, last = original(query, key, value, **options)
            if isinstance(initial_state, PagedState):
                initial_state.store(last)
                last = initial_state
            return found, last
        last = initial_state
        if last is None:
            last = value.new_zeros(rows, heads, key_dim, value_dim, dtype=torch.float32)
        elif isinstance(last, Tensor):
            last = last.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        state = PagedState.of(last) if isinstance(last, Tensor) else last
        query, key, value, g, beta = map(_by_token, inputs)
        out = value.new_empty(value.shape)
        args = DeltaArgs(
            states=state.args,
            query=_numbers(query),
            key=_numbers(key),
            value=_numbers(value),
            decay=_numbers(g),
            beta=_numbers(beta),
            out=out.data_ptr(),
            rows=rows,
            tokens=tokens,
            heads=heads,
            key_heads=key.shape[2],
            key_dim=key_dim,
            value_dim=value_dim,
            decays=1 if g.ndim == beta.ndim else key_dim,
            normalize=normalize,
            path=self._path,
        )
        self._library.delta(ctypes.byref(args), self._library.parallel_for)
        return out, last

    def selective_state(  # noqa: PLR0913 - arguments of Transformers
        self,
        original: Callable[..., Any],
        state: PagedState | Tensor,
        hidden_states: Float[Tensor, "row head dim"],
        dt: Float[Tensor, "row head dim"],
        A: Float[Tensor, "head dim state"],  # noqa: N803 - names of Transformers
        B: Float[Tensor, "row group state"],  # noqa: N803
        C: Float[Tensor, "row group state"],  # noqa: N803
        D: Float[Tensor, "head dim"] | None = None,  # noqa: N803
        *,
        dt_bias: Float[Tensor, "head dim"] | None = None,
        dt_softplus: bool = False,
        z: Float[Tensor, "row head dim"] | None = None,
        **options: Any,
    ) -> Float[Tensor, "row head dim"]:
        """Update as Mamba 2 does for one token; see `mamba2_selective_state_update`."""
        of_heads = (dt, A, *(x for x in (D, dt_bias) if x is not None))
        alike = all(x.stride(-1) == 0 for x in of_heads) and A.stride(1) == 0
        inputs = (hidden_states, B, C)
        if isinstance(state, Tensor) or not alike or not _is_small(*inputs):
            options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            copy = state if isinstance(state, Tensor) else state.load()
            found: Tensor = original(copy, hidden_states, dt, A, B, C, D, **options)
            if isinstance(state, PagedState):
                state.store(copy)
            return found
        step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[:, 0].to(dt.dtype)
        step = F.softplus(step) if dt_softplus else step
        skip = None if D is None else D[:, 0]
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        x, step, key, query = (x[:, None] for x in (hidden_states, step, B, C))
        self._space(state, x, step, key, query, A[:, 0, 0], skip, out)
        return out if z is None else out * F.silu(z)

    def scan(  # noqa: PLR0913 - arguments of Transformers
        self,
        original: Callable[..., Any],
        hidden_states: Float[Tensor, "row token head dim"],
        dt: Float[Tensor, "row token head"],
        A: Float[Tensor, " head"],  # noqa: N803 - names of Transformers
        B: Float[Tensor, "row token group state"],  # noqa: N803
        C: Float[Tensor, "row token group state"],  # noqa: N803
        *,
        D: Float[Tensor, " head"] | None = None,  # noqa: N803
        dt_bias: Float[Tensor, " head"] | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = (0.0, math.inf),
        initial_states: Float[Tensor, "row head dim state"] | None = None,
        return_final_states: bool = False,
        **options: Any,
    ) -> Any:
        """Update as Mamba 2 does for several tokens; see `mamba2_chunk_scan`."""
        if not _is_small(hidden_states, B, C):
            options |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
            options |= {"dt_limit": dt_limit, "initial_states": initial_states}
            options["return_final_states"] = return_final_states
            return original(hidden_states, dt, A, B, C, **options)
        rows, _, heads, dim = hidden_states.shape
        if initial_states is None:
            last = hidden_states.new_zeros(rows, heads, dim, B.shape[3], dtype=torch.float32)
        else:
            form = torch.contiguous_format
            last = initial_states.to(torch.float32, memory_format=form, copy=True)
        step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        out = hidden_states.new_empty(hidden_states.shape, dtype=torch.float32)
        self._space(PagedState.of(last), hidden_states, step, B, C, A, D, out)
        return (out, last) if return_final_states else out

    def _space(  # noqa: PLR0913 - one call of the library
        self,
        state: PagedState,
        x: Float[Tensor, "row token head dim"],
        step: Float[Tensor, "row token head"],
        key: Float[Tensor, "row token group state"],
        query: Float[Tensor, "row token group state"],
        decay: Float[Tensor, " head"],
        skip: Float[Tensor, " head"] | None,
        out: Tensor,
    ) -> None:
        x, step, key, query = map(_by_token, (x, step, key, query))
        decay = decay.float().contiguous()
        skip = None if skip is None else skip.float().contiguous()
        heads, dim, size = state.shape
        args = SpaceArgs(
            states=state.args,
            x=_numbers(x),
            step=_numbers(step),
            key=_numbers(key),
            query=_numbers(query),
            decay=decay.data_ptr(),
            skip=None if skip is None else skip.data_ptr(),
            out=out.data_ptr(),
            rows=x.shape[0],
            tokens=x.shape[1],
            heads=heads,
            groups=key.shape[2],
            dim=dim,
            state=size,
            out_dtype=DTYPES[out.dtype],
            path=self._path,
        )
        self._library.space(ctypes.byref(args), self._library.parallel_for)


def _fits(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_cpu


def _is_small(*heads: Tensor) -> bool:
    return all(_fits(x) and x.shape[-1] <= MAX_DIM for x in heads)


def _by_token(x: Tensor) -> Tensor:
    """Return a tensor [row, token, ...] whose tokens are contiguous: itself, or a copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def _numbers(x: Tensor) -> RowNumbers:
    return RowNumbers(x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype], 0)
