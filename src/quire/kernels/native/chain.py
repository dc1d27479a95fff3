"""Chains: calls of the C library that follow each other without Python between them."""

import ctypes
from collections.abc import Sequence

import torch

from quire.errors import InvariantError
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear_args import (
    ChainCall,
    CodeArgs,
    LinearArgs,
    NormArgs,
    RopeArgs,
)

ChainArgs = LinearArgs | NormArgs | RopeArgs | CodeArgs
CHAIN_PARTS = ("qkv", "output projection", "mlp", "head", "norms and RoPE")
_KINDS = {LinearArgs: 0, NormArgs: 1, RopeArgs: 2, CodeArgs: 3}  # as in rows.h


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


class Chain:
    """Calls in order, with arguments that are built once.

    Args:
        library: the loaded C library.
        parts: arguments of the calls, with the name in CHAIN_PARTS that their time counts for; the
            owner keeps the memory they point to alive.
    """

    def __init__(self, library: NativeLibrary, *parts: tuple[str, Sequence[ChainArgs]]) -> None:
        self._library = library
        self._steps = tuple(step for _, steps in parts for step in steps)
        calls = [
            ChainCall(ctypes.addressof(step), _KINDS[type(step)], CHAIN_PARTS.index(part))
            for part, steps in parts
            for step in steps
        ]
        self._calls = (ChainCall * len(calls))(*calls)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of every call."""
        for step in self._steps:
            step.rows = rows

    def run(self, times: PartTimes | None = None) -> None:
        """Make the calls; add their times to `times`."""
        library = self._library
        threads = torch.get_num_threads()
        nanoseconds = None if times is None else times.nanoseconds
        status = library.chain(
            self._calls, len(self._steps), library.parallel_for, threads, nanoseconds
        )
        if status:
            raise InvariantError("the C extension has no linear layers for this machine")
