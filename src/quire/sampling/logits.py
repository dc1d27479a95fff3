"""Logits of a step, and the masks, biases and penalties applied to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.config.sampling_params import SamplingParams
from quire.kernels import sampling
from quire.kernels.device_copies import to_device
from quire.sampling.grammar_matcher import unpacked
from quire.scheduler.request import Request, TokenMatcher


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of one request in a step."""

    request: Request
    first_position: int  # logical position of the first row's token
    batch: Tensor  # [batch rows, vocab], of all requests
    first_row: int
    num_rows: int

    @property
    def logits(self) -> Tensor:
        """[rows, vocab]; row i belongs to the token at first_position + i."""
        return self.batch[self.first_row : self.first_row + self.num_rows]

    def only(self, row: int) -> "StepLogits":
        """These logits with one of their rows."""
        place = self.first_position + row
        return replace(self, first_position=place, first_row=self.first_row + row, num_rows=1)


def last_rows(results: Sequence[StepLogits]) -> Float[Tensor, "rows vocab"]:
    """Return the last row of each request; no copy if they are adjacent in one batch."""
    batch = results[0].batch
    if any(result.batch is not batch for result in results):
        return torch.cat([result.logits[-1:] for result in results])
    rows = [result.first_row + result.num_rows - 1 for result in results]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return batch[rows[0] : rows[0] + len(rows)]
    return batch[column(batch, rows)]


@runtime_checkable
class SamplingRow(Protocol):
    """The request of one row, for the sampler.

    `sampling_seed` is used if `params.seed` is None. `num_output_tokens` includes sampled tokens
    whose values are still on the device; `output_token_ids` does not.
    """

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def sampling_seed(self) -> int: ...
    @property
    def matcher(self) -> TokenMatcher | None: ...


def edit(
    logits: Float[Tensor, "rows vocab"],
    rows: Sequence[SamplingRow],
    eos_token_ids: tuple[int, ...],
) -> Float[Tensor, "rows vocab"]:
    """Apply masks, then biases, then penalties; these also affect greedy rows.

    Args:
        logits: [rows, vocab] in float32.
        rows: one per row of `logits`.
        eos_token_ids: end-of-sequence tokens, which `min_tokens` masks unless `ignore_eos` is set.
    """
    return _penalize(_bias(_mask(logits, rows, eos_token_ids), rows), rows)


def held_back(row: SamplingRow, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """End tokens that are masked while the output has fewer than `min_tokens` tokens.

    None if the output is a complete structure, which only an end token can follow.
    """
    params = row.params
    if row.num_output_tokens >= params.min_tokens:
        return ()
    if row.matcher is not None and row.matcher.must_end(row.output_token_ids):
        return ()
    return params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)


def _mask(
    logits: Float[Tensor, "rows vocab"],
    rows: Sequence[SamplingRow],
    eos_token_ids: tuple[int, ...],
) -> Float[Tensor, "rows vocab"]:
    allowed = [row.params.allowed_token_ids or () for row in rows]
    if any(allowed):
        logits = sampling.keep_only(logits, *pairs(logits, allowed))
    logits = _keep_grammatical(logits, rows)
    banned = [
        [*held_back(row, eos_token_ids), *_unused_ends(row, eos_token_ids), *_ended_sequences(row)]
        for row in rows
    ]
    if any(banned):
        logits = sampling.ban(logits, *pairs(logits, banned))
    return logits


def _keep_grammatical(
    logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
) -> Float[Tensor, "rows vocab"]:
    """Ban the tokens that do not continue the structure of a row's output."""
    matchers = {index: row.matcher for index, row in enumerate(rows) if row.matcher is not None}
    if not matchers:
        return logits
    masks = [matcher.mask(rows[index].output_token_ids) for index, matcher in matchers.items()]
    allowed = to_device(unpacked(masks, logits.shape[1]), logits.device)
    structured = column(logits, list(matchers))
    kept = logits[structured].masked_fill(~allowed, -torch.inf)
    return logits.index_put((structured,), kept)


def _unused_ends(row: SamplingRow, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """End tokens of a structured output that ignores them: it ends where its structure must."""
    return eos_token_ids if row.matcher is not None and row.params.ignore_eos else ()


def narrow(
    logits: Float[Tensor, "rows vocab"], options: Sequence[SamplingParams]
) -> Float[Tensor, "rows vocab"]:
    """Apply temperature, then top-k, top-p and min-p, each to the rows that set it."""
    temperatures = [option.temperature or 1.0 for option in options]
    logits = sampling.apply_temperature(logits, column(logits, temperatures, logits.dtype))
    top_k = {row: option.top_k for row, option in enumerate(options) if (option.top_k or 0) > 0}
    top_p = {
        row: option.top_p for row, option in enumerate(options) if option.top_p not in (None, 1.0)
    }
    min_p = {row: option.min_p for row, option in enumerate(options) if option.min_p}
    largest = max((count or 0 for count in top_k.values()), default=None)
    logits = _on_rows(partial(sampling.keep_top_k, largest=largest), logits, top_k)
    logits = _on_rows(sampling.keep_top_p, logits, top_p)
    return _on_rows(sampling.keep_min_p, logits, min_p)


def _on_rows(
    keep: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    values: Mapping[int, int | float | None],
) -> Tensor:
    if not values:
        return logits
    numbers = column(logits, list(values.values()))
    if len(values) == len(logits):
        return keep(logits, numbers)
    rows = column(logits, list(values))
    return logits.index_put((rows,), keep(logits[rows], numbers))


def column(
    logits: Tensor, values: Sequence[int | float | None], dtype: torch.dtype | None = None
) -> Shaped[Tensor, " rows"]:
    """A tensor with one number per row on the device of the logits."""
    return to_device(np.asarray(values), logits.device, dtype)


def _penalize(
    logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
) -> Float[Tensor, "rows vocab"]:
    options = [row.params for row in rows]
    repetition = [option.repetition_penalty or 1.0 for option in options]
    if any(penalty != 1.0 for penalty in repetition):
        tokens = [
            [*row.prompt_token_ids, *row.output_token_ids] if penalty != 1.0 else ()
            for row, penalty in zip(rows, repetition, strict=True)
        ]
        seen = sampling.count_tokens(*pairs(logits, tokens), *logits.shape) > 0
        logits = sampling.penalize_repetition(
            logits, seen, column(logits, repetition, logits.dtype)
        )
    if any(option.presence_penalty or option.frequency_penalty for option in options):
        outputs = [row.output_token_ids for row in rows]
        logits = sampling.penalize_output(
            logits,
            sampling.count_tokens(*pairs(logits, outputs), *logits.shape),
            column(logits, [option.presence_penalty for option in options], logits.dtype),
            column(logits, [option.frequency_penalty for option in options], logits.dtype),
        )
    return logits


def _bias(
    logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
) -> Float[Tensor, "rows vocab"]:
    width = logits.shape[1]
    biases = [
        {token: value for token, value in (row.params.logit_bias or {}).items() if token < width}
        for row in rows
    ]
    if not any(biases):
        return logits
    values = [value for bias in biases for value in bias.values()]
    return sampling.add_bias(
        logits, *pairs(logits, [list(bias) for bias in biases]), column(logits, values)
    )


def _ended_sequences(row: SamplingRow) -> list[int]:
    """The last ids of the banned sequences whose other ids end the prompt and output."""
    ended = []
    for *before, last in row.params.bad_token_ids:
        from_output = list(row.output_token_ids[-len(before) :]) if before else []
        missing = len(before) - len(from_output)
        from_prompt = list(row.prompt_token_ids[-missing:]) if missing else []
        if from_prompt + from_output == before:
            ended.append(last)
    return ended


def pairs(
    logits: Tensor, token_ids: Sequence[Sequence[int]]
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Return row and token indices of lists of tokens, one list per row.

    Ids beyond the logits are left out, because an embedding may be larger than the LM head.
    """
    row_ids = np.repeat(np.arange(len(token_ids)), [len(listed) for listed in token_ids])
    flat = np.fromiter((token for listed in token_ids for token in listed), dtype=np.int64)
    known = flat < logits.shape[1]
    row_ids, flat = row_ids[known], flat[known]
    return to_device(row_ids, logits.device), to_device(flat, logits.device)
