"""Samples the rows of a batch on the device of their logits, with one read of the results.

The operations are those of `kernels.sampling`. Options and numbers of output tokens are known on
the CPU and copied without waiting. The tokens, their validity and the requested log-probabilities
are read together: this is the only point of a decode step at which the CPU waits for the device.
The copy to the CPU begins with the sampling, so that the next step can be launched before the wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.config.sampling_params import SamplingParams
from quire.kernels import sampling
from quire.kernels.device_copies import ReadNumbers, StartRead, start_read
from quire.sampling.logits import SamplingRow, column, edit, narrow

SCRATCH_BYTES = 256 << 20
"""Device memory of rows that are sampled at once; rows are sampled in blocks of this size."""

SCRATCH_BYTES_OF_TOKEN = 64
"""Scratch memory of a token of a row: float64 and int64 copies in top-p and in the draw."""


@dataclass(frozen=True, slots=True)
class RowScore:
    """Scores of a sampled token."""

    logprob: float  # nats, under the unmodified logits
    rank: int  # 1 for the likeliest token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows to sample."""

    rows: Sequence[SamplingRow]
    shaped: Sequence[int] = ()  # rows that need more than the likeliest token
    is_edited: bool = False  # whether masks, biases or penalties change the logits of a shaped row
    uniforms: Sequence[float] = ()  # in [0, 1), one for each shaped row
    # requested number of likeliest tokens, by row
    scored: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Sampled tokens."""

    token_ids: list[int]
    bad: list[int]  # rows with NaN or infinite logits
    without_token: list[int]  # rows whose options leave no token, or `bad` ones
    scores: dict[int, RowScore]


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """Tokens that are being sampled on the device."""

    token_ids: Int[Tensor, " rows"]  # [rows] on the device
    wanted: DeviceRows
    read: ReadNumbers  # waits for the results and returns them as one array

    def wait(self) -> DeviceTokens:
        return _unpacked(self.read().tolist(), len(self.wanted.rows), self.wanted.scored)


def sample_on_device(
    logits: Float[Tensor, "rows vocab"],
    wanted: DeviceRows,
    eos_token_ids: tuple[int, ...],
    read: StartRead = start_read,
    *,
    candidates: Float[Tensor, "rows candidates"] | None = None,
    unlisted: Int[Tensor, " unlisted"] | None = None,
) -> LaunchedTokens:
    """Sample one token per row, without waiting for the device."""
    candidates = logits if candidates is None else candidates
    best, token_ids = candidates.max(dim=-1)
    is_bad = ~best.isfinite()
    has_none = torch.zeros_like(is_bad)
    if wanted.shaped:
        token_ids, has_none = _shaped(candidates, wanted, eos_token_ids, token_ids, has_none)
    scores = _scores(logits, token_ids, wanted.scored, unlisted)
    parts = [token_ids, is_bad, has_none, *scores]
    numbers = torch.cat([part.reshape(-1).double() for part in parts])
    return LaunchedTokens(token_ids, wanted, read(numbers))


def _shaped(
    logits: Tensor,
    wanted: DeviceRows,
    eos_token_ids: tuple[int, ...],
    token_ids: Tensor,
    has_none: Tensor,
) -> tuple[Tensor, Tensor]:
    size, results = block_rows(logits), []
    for first in range(0, len(wanted.shaped), size):
        part = slice(first, first + size)
        shaped, uniforms = list(wanted.shaped[part]), wanted.uniforms[part]
        own = logits[part] if len(wanted.shaped) == len(wanted.rows) else None
        if own is None:
            own = logits[column(logits, shaped)]
        rows = [wanted.rows[row] for row in shaped]
        results.append(
            choose(own.float(), rows, uniforms, eos_token_ids, is_edited=wanted.is_edited)
        )
    chosen, failed = map(torch.cat, zip(*results, strict=True))
    if len(wanted.shaped) == len(wanted.rows):
        return chosen, failed
    index = column(logits, list(wanted.shaped))
    return token_ids.index_copy(0, index, chosen), has_none.index_copy(0, index, failed)


def block_rows(logits: Float[Tensor, "rows vocab"]) -> int:
    """Return the number of rows that are sampled at once, so that scratch memory is bounded."""
    return _block_rows(logits.shape[1])


def _block_rows(vocab_size: int) -> int:
    return max(1, SCRATCH_BYTES // (SCRATCH_BYTES_OF_TOKEN * vocab_size))


def sampling_scratch_bytes(rows: int, vocab_size: int) -> int:
    """Return the most scratch memory in bytes that sampling needs next to the logits."""
    return min(rows, _block_rows(vocab_size)) * vocab_size * SCRATCH_BYTES_OF_TOKEN


def choose(
    logits: Float[Tensor, "rows vocab"],
    rows: Sequence[SamplingRow],
    uniforms: Sequence[float],
    eos_token_ids: tuple[int, ...],
    *,
    is_edited: bool,
) -> tuple[Tensor, Tensor]:
    """Sample with the rows' options; return tokens, and whether a row has none."""
    if is_edited:
        logits = edit(logits, rows, eos_token_ids)
    best, token_ids = logits.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        return token_ids, ~best.isfinite()
    options: list[SamplingParams] = [rows[index].params for index in drawn]
    numbers = column(logits, [uniforms[index] for index in drawn])
    if len(drawn) == len(rows):
        candidates = narrow(logits, options)
        return sampling.draw(candidates, numbers), ~candidates.amax(dim=-1).isfinite()
    at = column(logits, drawn)
    candidates = narrow(logits[at], options)
    best = best.index_copy(0, at, candidates.amax(dim=-1))
    return token_ids.index_copy(0, at, sampling.draw(candidates, numbers)), ~best.isfinite()


def _scores(
    logits: Tensor, token_ids: Tensor, scored: Mapping[int, int], unlisted: Tensor | None
) -> tuple[Tensor, ...]:
    """Return log-probabilities, ranks, likeliest log-probabilities and their tokens."""
    if not scored:
        return ()
    rows, size, most = list(scored), block_rows(logits), max(scored.values())
    blocks = (column(logits, rows[first : first + size]) for first in range(0, len(rows), size))
    parts = [sampling.score(logits[index], token_ids[index], most, unlisted) for index in blocks]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _unpacked(numbers: list[float], rows: int, scored: Mapping[int, int]) -> DeviceTokens:
    """Split the numbers that were read together; all of them are exact in float64."""
    ids, bad, none = (numbers[start : start + rows] for start in (0, rows, 2 * rows))
    rest, count, most = numbers[3 * rows :], len(scored), max(scored.values(), default=0)
    logprobs, ranks, tops = rest[:count], rest[count : 2 * count], rest[2 * count :]
    top_logprobs, top_ids = tops[: count * most], tops[count * most :]
    scores = {}
    for place, (row, num_top) in enumerate(scored.items()):
        own = slice(place * most, place * most + num_top)
        top = zip(map(int, top_ids[own]), top_logprobs[own], strict=True)
        scores[row] = RowScore(logprobs[place], int(ranks[place]), tuple(top))
    return DeviceTokens(list(map(int, ids)), _set(bad), _set(none), scores)


def _set(flags: list[float]) -> list[int]:
    return [row for row, flag in enumerate(flags) if flag]


def requested_scores(rows: Sequence[SamplingRow]) -> dict[int, int]:
    """Requested number of likeliest tokens, by index of the rows with log-probabilities."""
    requested = ((index, row.params.logprobs) for index, row in enumerate(rows))
    return {index: num_top for index, num_top in requested if num_top is not None}


def uniform_of(row: SamplingRow) -> float:
    """Uniform random number in [0, 1) from the row's seed and its number of output tokens.

    0 for greedy rows, which need none.

    Source: Salmon et al. 2011 (Philox): a counter-based generator without state.
    """
    if row.params.greedy:
        return 0.0
    key = np.array(seed_and_position(row), dtype=np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


def seed_and_position(row: SamplingRow) -> tuple[int, int]:
    """Key of a row's random number: its seed, and its number of output tokens."""
    seed = row.sampling_seed if row.params.seed is None else row.params.seed
    return seed % 2**64, row.num_output_tokens
