"""Calls of the C library that select the tokens to retain, on arrays in CPU memory.

Each computes exactly what a function of `quire.policies` computes with NumPy:

best              `choose.best_with_numpy`
signed            `signatures.units.Units.of` and `SelectionContext.words`, for single slots
representatives   `signatures.representatives.choose_representatives` and `choose_best`
retained          the best slots and their representatives, of `crushed.Crushed.retained_of`
"""

import ctypes
import functools
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.native.arguments import (
    AlignArgs,
    BestArgs,
    FreeArgs,
    RepresentArgs,
    RetainArgs,
    SignArgs,
)
from quire.kernels.native.library import NativeLibrary, NotLoaded
from quire.kernels.native.self_test import tested_library

WORD_BITS, WORD_BYTES = 64, 8
PADDING = 32  # keys are padded to a multiple of this: BLOCK of select.c
Marks = NDArray[np.bool_]
Words = NDArray[np.uint64]


class NativeSelection:
    """Selects tokens with the C library.

    Args:
        library: the loaded C library.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def best(
        self, score: NDArray[np.float32], free: Marks, wanted: NDArray[np.integer[Any]]
    ) -> Marks:
        """Mark the best `wanted` free columns of each row, or all; ties to the lower column.

        Args:
            score: [row, column] or [row, head, column], finite if free.
            free: [row, column].
            wanted: [row] number of columns, for each head.
        """
        best = np.empty(score.shape, dtype=np.bool_)
        score = score if score.ndim == 3 else score[:, None]
        score, free = _in_lines(score), _in_lines(free)
        wanted = np.ascontiguousarray(wanted, dtype=np.int64)
        rows, heads, columns = score.shape
        keys = np.empty(2 * (columns + PADDING), dtype=np.int32)
        args = BestArgs(
            score=_address(score),
            free=_address(free),
            wanted=_address(wanted),
            best=_address(best),
            keys=_address(keys),
            score_row=score.strides[0] // score.itemsize,
            score_head=score.strides[1] // score.itemsize,
            free_row=free.strides[0],
            rows=rows,
            heads=heads,
            columns=columns,
            rows_per_layer=1,
            path=self._library.path,
        )
        self._library.best(ctypes.byref(args))
        return best

    def signed(
        self,
        live: Bool[Tensor, "row slot"],
        protected: Bool[Tensor, "row slot"],
        keep: Int[Tensor, " row"],
        score: Float[Tensor, "row head slot"],
        positions: Int[Tensor, "row slot"],
        *,
        past_end: int,
        rows_per_layer: int,
    ) -> tuple[slice, Marks, NDArray[np.int64], Words]:
        """Return the slots that may be evicted one by one, and the bits of all heads by token.

        Args:
            live: slots that hold a token.
            protected: slots that are always retained.
            keep: int64 number of slots to retain.
            score: float32, finite if the slot is live and not protected.
            positions: int64, ascending, -1 for the empty slots at the end; not read if a layer is
                one row.
            past_end: a number above all positions.
            rows_per_layer: rows of a layer; its heads fit in a word.

        Returns:
            The range from the first to the last of these slots; marks of them in this range, [row,
            column]; the number of them to retain, [row]; for every column a bit of each query head
            of the layer, 0 for empty slots, [row, column].
        """
        parts = (live, protected, keep, score, positions)  # addresses of tensors are fast
        live, protected, keep, score, positions = (part.contiguous() for part in parts)
        (rows, slots), path = live.shape, self._library.path
        ends = list(accumulate((rows * slots, past_end, rows, slots + PADDING)))
        room = np.empty(ends[-1] + (rows + 1) * slots // 8 + 1, dtype=np.int64)
        address = _address(room)
        words, tokens, retained, keys, free = (address + WORD_BYTES * start for start in (0, *ends))
        args = SignArgs(
            free=FreeArgs(
                live=live.data_ptr(),
                protected=protected.data_ptr(),
                keep=keep.data_ptr(),
                free=free,
                retained=retained,
                rows=rows,
                slots=slots,
                path=path,
            ),
            best=BestArgs(
                score=score.data_ptr(),
                keys=keys,
                score_row=score.stride(0),
                score_head=score.stride(1),
                heads=score.shape[1],
                rows_per_layer=rows_per_layer,
                path=path,
            ),
            align=AlignArgs(
                words=words,
                positions=positions.data_ptr(),
                tokens=tokens,
                past_end=past_end,
            ),
        )
        self._library.sign(ctypes.byref(args))
        first, end = args.free.columns
        shape, size = (rows, end - first), rows * (end - first)
        return (
            slice(first, end),
            room[ends[3] :].view(np.bool_)[:size].reshape(shape),
            room[ends[1] : ends[2]],
            room[:size].view(np.uint64).reshape(shape),
        )

    def representatives(
        self,
        words: Words,
        grouped: Marks,
        count: NDArray[np.int64],
        anchor: Words | None = None,
        score: NDArray[np.float32] | None = None,
    ) -> Marks:
        """Select one unit of each slice of the grouped ones, in the order of (distance, unit).

        Args:
            words: [row, unit, word] signatures.
            grouped: [row, unit] units to select from.
            count: [row] number of slices; all grouped units if there are fewer.
            anchor: [row, 1, word] to measure distances from; None: majority of the grouped.
            score: [row, unit] to select the best of each slice; None: its middle.
        """
        words, grouped = np.ascontiguousarray(words), np.ascontiguousarray(grouped)
        count = np.ascontiguousarray(count, dtype=np.int64)
        anchor = None if anchor is None else np.ascontiguousarray(anchor)
        score = None if score is None else _in_lines(score)
        rows, units, unit_words = words.shape
        chosen = np.zeros((rows, units), dtype=np.bool_)
        scratch = np.empty(self._library.represent_words(units, unit_words), dtype=np.uint64)
        args = RepresentArgs(
            words=_address(words),
            anchor=None if anchor is None else _address(anchor),
            grouped=_address(grouped),
            count=_address(count),
            score=None if score is None else _address(score),
            chosen=_address(chosen),
            scratch=_address(scratch),
            score_row=0 if score is None else score.strides[0] // score.itemsize,
            rows=rows,
            units=units,
            unit_words=unit_words,
            path=self._library.path,
        )
        self._library.represent(ctypes.byref(args))
        return chosen

    def retained(  # noqa: PLR0913 - arrays of a call
        self,
        live: Marks,
        free: Marks,
        first: int,
        retained: NDArray[np.int64],
        count: NDArray[np.int64],
        words: Words,
        score: NDArray[np.float32],
        *,
        anchor: Words | None,
        pick_best: bool,
    ) -> Marks:
        """Retain the free slots with the best scores, and representatives of the rest.

        Args:
            live: [row, slot] slots that hold a token.
            free: [row, column] slots that may be evicted, as from `signed`.
            first: the slot of the first column.
            retained: [row] number of free slots to retain.
            count: [row] how many of these are representatives.
            words: [row, column, word] signatures.
            score: [row, column] finite if free.
            anchor: as of `representatives`.
            pick_best: whether the best of each slice represents it, not its middle.

        Returns:
            [row, slot] the retained slots; all live slots that are not free are among them.
        """
        live, free = np.ascontiguousarray(live), np.ascontiguousarray(free)
        words, score = np.ascontiguousarray(words), _in_lines(score)
        retained, count = (np.ascontiguousarray(n, dtype=np.int64) for n in (retained, count))
        anchor = None if anchor is None else np.ascontiguousarray(anchor)
        columns, unit_words = words.shape[1:]
        kept = np.empty(live.shape, dtype=np.bool_)
        num_words, keys = self._library.represent_words(columns, unit_words), columns + PADDING
        room = np.empty(num_words + keys + columns // 4 + 1, dtype=np.uint64)
        scratch = _address(room)
        args = RetainArgs(
            live=_address(live),
            free=_address(free),
            retained=_address(retained),
            count=_address(count),
            score=_address(score),
            words=_address(words),
            anchor=None if anchor is None else _address(anchor),
            kept=_address(kept),
            represent=scratch,
            keys=scratch + WORD_BYTES * num_words,
            marks=scratch + WORD_BYTES * (num_words + keys),
            score_row=score.strides[0] // score.itemsize,
            rows=len(live),
            slots=live.shape[1],
            first=first,
            columns=columns,
            unit_words=unit_words,
            pick_best=pick_best,
            path=self._library.path,
        )
        self._library.retain(ctypes.byref(args))
        return kept


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # faster than `array.ctypes.data`
    return address


def _in_lines(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the array with contiguous columns."""
    if numbers.strides[-1] == numbers.itemsize:
        return numbers
    return np.ascontiguousarray(numbers)


@functools.cache
def native_selection() -> NativeSelection | None:
    """Return the C library's selection; None if the library is not available."""
    library = tested_library()
    return None if isinstance(library, NotLoaded) else NativeSelection(library)
