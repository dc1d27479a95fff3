"""Chains: calls of the C library that follow each other without Python between them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.errors import InvariantError
from quire.kernels.native.arguments import (
    AttentionArgs,
    ChainCall,
    CodeArgs,
    ConvertArgs,
    LinearArgs,
    NormArgs,
    RopeArgs,
    WriteArgs,
)
from quire.kernels.native.library import NativeLibrary

CHAIN_PARTS = ("qkv", "attention", "output projection", "mlp", "head", "norms and RoPE")
RowArgs = LinearArgs | NormArgs | RopeArgs | CodeArgs | ConvertArgs
_CALLS = (LinearArgs, NormArgs, RopeArgs, CodeArgs, ConvertArgs, WriteArgs, AttentionArgs)
_KINDS = {arguments: kind for kind, arguments in enumerate(_CALLS)}  # as in rows.h


class PartTimes:
    """Time of the calls of chains, added up by component of the model."""

    def __init__(self) -> None:
        self.nanoseconds = (ctypes.c_int64 * len(CHAIN_PARTS))()

    def seconds(self) -> dict[str, float]:
        """Seconds of each component since the last reset."""
        return {part: n / 1e9 for part, n in zip(CHAIN_PARTS, self.nanoseconds, strict=True)}

    def reset(self) -> None:
        """Set all times to 0."""
        ctypes.memset(self.nanoseconds, 0, ctypes.sizeof(self.nanoseconds))


class LayerAttention(NamedTuple):
    """Attention of one layer, as two calls of a chain.

    Attributes:
        write: writes the new keys and values to their slots.
        attend: attends to the slots.
        num_threads: for `attend`.
        owner: holds the memory that the arguments point to.
    """

    write: WriteArgs
    attend: AttentionArgs
    num_threads: int
    owner: object


class Chain:
    """Calls in order, with arguments that are built once.

    Args:
        library: the loaded C library.
        parts: arguments of the calls, with the name in CHAIN_PARTS that their time counts for; the
            owner keeps the memory they point to alive.

    Attributes:
        calls: the calls, in an array of C.
    """

    def __init__(self, library: NativeLibrary, *parts: tuple[str, Sequence[RowArgs]]) -> None:
        self._library = library
        self._steps = tuple(step for _, steps in parts for step in steps)
        calls = [
            _call(type(step), part, ctypes.addressof(step))
            for part, steps in parts
            for step in steps
        ]
        self.calls = (ChainCall * len(calls))(*calls)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of every call."""
        for step in self._steps:
            step.rows = rows

    def run(self, times: PartTimes | None = None) -> None:
        """Make the calls; add their times to `times`."""
        _run(self._library, self.calls, times)


class LayerChain:
    """The calls of all layers of a decoder, with attention between two chains of each layer.

    Args:
        library: the loaded C library.
        layers: calls before and after attention of each layer.
    """

    def __init__(self, library: NativeLibrary, layers: Sequence[tuple[Chain, Chain]]) -> None:
        self._library = library
        write, attend = _call(WriteArgs, "attention"), _call(AttentionArgs, "attention")
        calls: list[ChainCall] = []
        self._writes: list[int] = []  # index of the write of each layer; `attend` follows it
        for before, after in layers:
            self._writes.append(len(calls) + len(before.calls))
            calls += [*before.calls, write, attend, *after.calls]
        self._calls = (ChainCall * len(calls))(*calls)
        self._attention: Sequence[object] = ()

    def run(self, attention: Sequence[object], times: PartTimes | None = None) -> None:
        """Make the calls.

        Args:
            attention: a LayerAttention for each layer; the sequence of the last run has not changed
                since.
            times: times of the calls are added to these.
        """
        if attention is not self._attention:
            self._set_attention(attention)
        _run(self._library, self._calls, times)

    def _set_attention(self, attention: Sequence[object]) -> None:
        self._attention = attention
        for write, layer in zip(self._writes, attention, strict=True):
            assert isinstance(layer, LayerAttention), "the calls come from the native backend"
            self._calls[write].args = ctypes.addressof(layer.write)
            attend = self._calls[write + 1]
            attend.args, attend.num_threads = ctypes.addressof(layer.attend), layer.num_threads


def _call(arguments: type[ctypes.Structure], part: str, address: int | None = None) -> ChainCall:
    return ChainCall(address, _KINDS[arguments], CHAIN_PARTS.index(part))


def _run(library: NativeLibrary, calls: "ctypes.Array[ChainCall]", times: PartTimes | None) -> None:
    threads, nanoseconds = torch.get_num_threads(), None if times is None else times.nanoseconds
    if library.chain(calls, len(calls), library.parallel_for, threads, nanoseconds):
        raise InvariantError("the C extension has no code for the layers of this decoder")
