"""Calls of the C library that sample one token of each row of logits.

They compute what `quire.kernels.sampling` computes operation by operation: temperature, top-k,
top-p, min-p and the draw. Random numbers are those of `numpy.random.Philox`.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels import sampling
from quire.kernels.native.arguments import PLAIN, SampleArgs, SampleRow
from quire.kernels.native.call import Scratch
from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Sampling options of a row.

    Attributes:
        seed, position: key of the random number, below 2 ** 64.
        temperature: divides the logits; 0 for the likeliest token, then the rest is not used.
        top_k: number of tokens; 0 for all.
        top_p: probability, in (0, 1].
        min_p: fraction of the largest probability, in [0, 1].
    """

    seed: int
    position: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


MAX_TOP_K = 2**31 - 1  # of an int32; above any vocabulary
SampledRows = tuple[list[int], list[int]]  # token of each row, indices of failed rows


class RowSampling:
    """Samples one token of each row.

    Args:
        library: the loaded C library.
        path: code path, AVX2 or better; None: the best of this CPU.
    """

    def __init__(self, library: NativeLibrary, path: int | None = None) -> None:
        self._library = library
        self._path = library.path if path is None else path
        self._scratch = Scratch()
        self._token_ids = torch.empty(0, dtype=torch.int64)
        self._status = torch.empty(0, dtype=torch.int32)

    def fits(self, logits: Tensor) -> bool:
        """Whether the library can read these logits."""
        return logits.dtype == torch.float32 and logits.is_cpu and logits.stride(1) == 1

    def likeliest(self, logits: Float[Tensor, "rows vocab"]) -> SampledRows:
        """Return the first of the likeliest tokens of each row, and the failed rows.

        A row fails if it has NaN, or if its largest logit is infinite.
        """
        return self._run(logits, None)

    def sample(
        self, logits: Float[Tensor, "rows vocab"], options: Sequence[RowOptions]
    ) -> SampledRows:
        """Sample a token of each row; also return the failed rows.

        A row fails as in `likeliest`, and if its largest logit overflows when divided by the
        temperature.
        """
        rows = (SampleRow * len(options))(*map(_row, options))
        within = [row for row, option in enumerate(options) if option.temperature]
        within = [row for row in within if options[row].top_p < 1]
        if within:
            totals = _log_totals(logits, within, [options[row] for row in within])
            for row, total in zip(within, totals, strict=True):
                rows[row].log_total = total
        return self._run(logits, rows)

    def _run(self, logits: Tensor, options: "ctypes.Array[SampleRow] | None") -> SampledRows:
        rows, vocab = logits.shape
        if len(self._status) < rows:
            self._token_ids = torch.empty(rows, dtype=torch.int64)
            self._status = torch.empty(rows, dtype=torch.int32)
        library, threads = self._library, min(rows, torch.get_num_threads())
        of_thread = 0 if options is None else library.sample_bytes(vocab)
        args = SampleArgs(
            logits=logits.data_ptr(),
            logits_row=logits.stride(0),
            options=None if options is None else ctypes.addressof(options),
            token_ids=self._token_ids.data_ptr(),
            status=self._status.data_ptr(),
            scratch=self._scratch.address(of_thread * threads) if of_thread else None,
            scratch_bytes=of_thread,
            rows=rows,
            vocab=vocab,
            path=self._path,
        )
        if library.sample(ctypes.byref(args), library.parallel_for, threads):
            raise InvariantError("the C extension cannot sample on this machine")
        failed = [row for row, status in enumerate(self._status[:rows].tolist()) if status]
        return self._token_ids[:rows].tolist(), failed


def _row(options: RowOptions) -> SampleRow:
    return SampleRow(
        options.seed,
        options.position,
        options.top_p,
        0.0,
        math.log(options.min_p) if options.min_p else -math.inf,
        options.temperature,
        min(options.top_k, MAX_TOP_K),
    )


def _log_totals(logits: Tensor, rows: list[int], options: Sequence[RowOptions]) -> list[float]:
    """Return the denominators of the probabilities of `sampling.keep_top_p`, as logarithms.

    They are float32, so their last bits depend on the order of a sum: the same operations give the
    same tokens.
    """
    logits = logits if len(rows) == len(logits) else logits[rows]
    temperatures = torch.tensor([option.temperature for option in options], dtype=torch.float32)
    scaled = sampling.apply_temperature(logits, temperatures)
    limited = [row for row, option in enumerate(options) if option.top_k]
    if limited:
        counts = torch.tensor([min(options[row].top_k, MAX_TOP_K) for row in limited])
        scaled[limited] = sampling.keep_top_k(scaled[limited], counts)
    return scaled.logsumexp(dim=-1).tolist()


def row_sampling() -> RowSampling | None:
    """Return the C library's sampling; None if it has no code for this CPU."""
    library = load_library()
    if isinstance(library, NotLoaded) or library.path == PLAIN:
        return None
    return RowSampling(library)
