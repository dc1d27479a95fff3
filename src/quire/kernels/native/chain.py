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
_KINDS = {LinearArgs: 0, NormArgs: 1, RopeArgs: 2, CodeArgs: 3}  # as in rows.h


class Chain:
    """Calls in order, with arguments that are built once.

    Args:
        library: the loaded C library.
        steps: arguments of each call; the owner keeps the memory they point to alive.
    """

    def __init__(self, library: NativeLibrary, steps: Sequence[ChainArgs]) -> None:
        self._library, self._steps = library, tuple(steps)
        calls = [ChainCall(ctypes.addressof(step), _KINDS[type(step)], 0) for step in steps]
        self._calls = (ChainCall * len(calls))(*calls)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of every call."""
        for step in self._steps:
            step.rows = rows

    def run(self) -> None:
        """Make the calls."""
        library = self._library
        threads = torch.get_num_threads()
        if library.chain(self._calls, len(self._steps), library.parallel_for, threads):
            raise InvariantError("the C extension has no linear layers for this machine")
