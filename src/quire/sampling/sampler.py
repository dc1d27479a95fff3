"""Samples the next token of every row of a batch, each row with its own options.

The order of the steps is that of vLLM and Transformers:

    raw logits ── reported log-probabilities are computed from these, without any changes
      └ allowed, bad and minimum-length masks ─ bias ─ repetition, presence and frequency penalties
          ├ greedy rows: the most likely token
          └ other rows: temperature ─ top-k ─ top-p ─ min-p ─ one sample

The random number of a row depends only on its seed and its number of output tokens. So neither the
rest of the batch nor a preemption changes it. For rows that need only the most likely token, one
argmax over their logits is computed. On a CPU the C library computes the steps from the temperature
on, row by row; torch's operations give the same tokens, and run on any device without waiting for
it (see `device_sampling`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.errors import InvariantError, RequestError
from quire.kernels import sampling
from quire.kernels.device_copies import StartRead, start_read, to_device
from quire.kernels.native.sampling import RowOptions, RowSampling, SampledRows
from quire.sampling import device_sampling
from quire.sampling.device_sampling import DeviceRows, LaunchedTokens, RowScore
from quire.sampling.logits import SamplingRow, edit, held_back, pairs

NO_TOKEN = -1
"""The `token_id` of a row that failed."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row, with its requested log-probabilities."""

    token_id: int  # `NO_TOKEN` if `error` is set
    logprob: float | None = None  # nats, under the unmodified logits
    # most likely first; may not contain the sampled token
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    rank: int | None = None  # 1 for the most likely one
    error: str | None = None  # why this row has no token
    # position in the output's text; may be beyond the end if a stop text cut the token
    text_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token with its log-probability (nats) and its rank (1 for the most likely)."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    rank: int


__all__ = [
    "BAD_LOGITS",
    "NO_TOKEN",
    "NO_TOKEN_LEFT",
    "SampledToken",
    "Sampler",
    "SamplingRow",
    "ScoredToken",
    "prompt_logprobs",
    "waited",
    "why_none",
]

BAD_LOGITS = "the model returned NaN or infinite logits"
NO_TOKEN_LEFT = (
    "the sampling options leave no token to sample: allowed_token_ids, bad_token_ids, "
    "structured_outputs and min_tokens together ban all tokens"
)

PROMPT_ROWS_AT_ONCE = 256
"""Prompt tokens scored in one operation: bounds the float32 copy of their logits."""


class Sampler:
    """Sampler of a model.

    Attributes:
        vocab_size: number of token ids; logits beyond it are padding and are never sampled.
        eos_token_ids: end-of-sequence tokens, which `min_tokens` masks unless `ignore_eos` is set.
        undecodable_ids: tokens without a text, such as padding of the embedding, except
            end-of-sequence tokens, which need none. A row samples them only if its `logit_bias`
            (with a bias of at least 0) or `allowed_token_ids` names them. They count in
            log-probabilities, but are not among the most likely tokens.
        one_by_one: compute each row separately, so that log-probabilities do not depend on the
            other rows even in the last bit.

    Args:
        vocab_size, eos_token_ids, undecodable_ids, one_by_one: see above.
        native: samples rows on a CPU; None: operations of torch for all rows.
        read: begins to copy results to the CPU.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        undecodable_ids: Iterable[int] = (),
        one_by_one: bool = False,
        native: RowSampling | None = None,
        read: StartRead = start_read,
    ) -> None:
        self._native, self._read = native, read
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.undecodable_ids = frozenset(undecodable_ids).difference(self.eos_token_ids)
        self._num_first = vocab_size - len(self.undecodable_ids)
        self._is_tail = self.undecodable_ids == frozenset(range(self._num_first, vocab_size))
        self._unlisted: dict[torch.device, Tensor] = {}
        self.one_by_one = one_by_one

    def sample(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
    ) -> list[SampledToken]:
        """One token per row; `error` is set for NaN or infinite logits, or without a token left."""
        self._check_shape(logits, rows)
        if not rows:
            return []
        if self.one_by_one and len(rows) > 1 and not all(map(self._is_exact, rows)):
            return [self.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        if self._native is not None and logits.is_cpu:
            logits = logits[:, : self.vocab_size]
            return self._sample_natively(self._native, logits, rows)
        return waited(self.launch(logits, rows))

    def launch(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
    ) -> LaunchedTokens:
        """Sample on the device of the logits, without waiting."""
        self._check_shape(logits, rows)
        shaped = self._shaped(rows)
        wanted = DeviceRows(
            rows,
            shaped,
            is_edited=any(self._is_edited(rows[index]) for index in shaped),
            uniforms=[device_sampling.uniform_of(rows[index]) for index in shaped],
            scored=device_sampling.requested_scores(rows),
        )
        logits = logits[:, : self.vocab_size]
        return device_sampling.sample_on_device(
            logits,
            wanted,
            self.eos_token_ids,
            self._read,
            candidates=self.candidates(logits, rows),
            unlisted=self.unlisted(logits.device),
        )

    def candidates(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
    ) -> Float[Tensor, "rows candidates"]:
        """Return the logits without those of undecodable tokens that the row does not name.

        Undecodable tokens at the end of the vocabulary are cut off, which copies nothing.
        """
        if not self.undecodable_ids:
            return logits
        named = [self._named(row) for row in rows]
        if self._is_tail and not any(named):
            return logits[:, : self._num_first]
        found = logits.index_fill(1, self._indices(logits.device), -torch.inf)
        at = pairs(logits, named)
        return found.index_put_(at, logits[at])

    def _named(self, row: SamplingRow) -> list[int]:
        bias, allowed = row.params.logit_bias or {}, row.params.allowed_token_ids or ()
        raised = [token for token in self.undecodable_ids & bias.keys() if bias[token] >= 0]
        return [*raised, *self.undecodable_ids.intersection(allowed)]

    def unlisted(self, device: torch.device) -> Int[Tensor, " tokens"] | None:
        """Return the undecodable tokens on a device; None if there are none."""
        return self._indices(device) if self.undecodable_ids else None

    def _indices(self, device: torch.device) -> Int[Tensor, " tokens"]:
        if device not in self._unlisted:
            self._unlisted[device] = to_device(np.array(sorted(self.undecodable_ids)), device)
        return self._unlisted[device]

    def _check_shape(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        if logits.shape[0] != len(rows) or logits.shape[1] < self.vocab_size:
            raise InvariantError(
                f"logits {tuple(logits.shape)} for {len(rows)} rows of {self.vocab_size} tokens"
            )

    def _shaped(self, rows: Sequence[SamplingRow]) -> list[int]:
        """Indices of the rows that need more than the likeliest token."""
        return [index for index, row in enumerate(rows) if not self._is_plain(row)]

    def _sample_natively(
        self,
        native: RowSampling,
        logits: Float[Tensor, "rows vocab"],
        rows: Sequence[SamplingRow],
    ) -> list[SampledToken]:
        candidates, shaped = self.candidates(logits, rows), self._shaped(rows)
        token_ids, failed = _likeliest(native, candidates)
        errors = dict.fromkeys(failed, BAD_LOGITS)
        if shaped:
            own = candidates if len(shaped) == len(rows) else candidates[shaped]
            chosen, failed = self._choose(native, own.float(), [rows[index] for index in shaped])
            for index, token_id in zip(shaped, chosen, strict=True):
                token_ids[index] = token_id
            for index in failed:
                errors.setdefault(shaped[index], why_none([rows[shaped[index]]]))
        scored = device_sampling.requested_scores(rows)
        scored = {index: top for index, top in scored.items() if index not in errors}
        scores = _row_scores(logits, token_ids, scored, self.unlisted(logits.device))
        return _report(token_ids, scores, errors)

    def search_logits(self, logits: Float[Tensor, "beams vocab"]) -> Float[Tensor, "beams vocab"]:
        return logits

    def _is_exact(self, row: SamplingRow) -> bool:
        return self._is_plain(row) and row.params.logprobs is None

    def _is_plain(self, row: SamplingRow) -> bool:
        return row.params.greedy and not self._is_edited(row)

    def _is_edited(self, row: SamplingRow) -> bool:
        return row.params.edits_logits or bool(held_back(row, self.eos_token_ids))

    def _choose(
        self,
        native: RowSampling,
        logits: Float[Tensor, "rows vocab"],
        rows: Sequence[SamplingRow],
    ) -> SampledRows:
        """Sample with the rows' options; also return the rows without a token."""
        if any(map(self._is_edited, rows)):
            logits = edit(logits, rows, self.eos_token_ids)
        return native.sample(logits, list(map(_options, rows)))


def waited(launched: LaunchedTokens) -> list[SampledToken]:
    """Wait for launched tokens and return them; see `Sampler.sample`."""
    found, rows = launched.wait(), launched.wanted.rows
    errors = dict.fromkeys(found.bad, BAD_LOGITS)
    for index in found.without_token:
        errors.setdefault(index, why_none([rows[index]]))
    return _report(found.token_ids, found.scores, errors)


def _likeliest(native: RowSampling, logits: Float[Tensor, "rows vocab"]) -> SampledRows:
    if native.fits(logits):
        return native.likeliest(logits)
    best, token_ids = logits.max(dim=-1)
    failed = (~best.isfinite()).tolist()
    return token_ids.tolist(), [index for index, is_set in enumerate(failed) if is_set]


def prompt_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    next_token_ids: Sequence[int],
    num_top: int,
    *,
    one_by_one: bool = False,
    unlisted: Int[Tensor, " unlisted"] | None = None,
) -> list[ScoredToken]:
    """Compute log-probabilities of prompt tokens under the model's unmodified distribution."""
    scored: list[ScoredToken] = []
    next_ids = torch.tensor(next_token_ids, dtype=torch.int64, device=logits.device)
    rows = 1 if one_by_one else PROMPT_ROWS_AT_ONCE
    for first in range(0, len(next_token_ids), rows):
        tokens = slice(first, first + rows)
        if not bool(logits[tokens].amax(dim=-1).isfinite().all()):
            raise RequestError(f"{BAD_LOGITS} for this prompt")
        scored += _score(logits[tokens], next_ids[tokens], num_top, unlisted)
    return scored


def why_none(rows: Iterable[SamplingRow]) -> str:
    """Why the masks of a row, or of all beams of a search, leave no token."""
    errors = (None if row.matcher is None else row.matcher.error for row in rows)
    return next(filter(None, errors), NO_TOKEN_LEFT)


def _options(row: SamplingRow) -> RowOptions:
    params = row.params
    seed, position = device_sampling.seed_and_position(row)
    return RowOptions(
        seed=seed,
        position=position,
        temperature=0.0 if params.greedy else params.temperature or 1.0,
        top_k=max(0, params.top_k or 0),
        top_p=params.top_p or 1.0,
        min_p=params.min_p or 0.0,
    )


def _score(
    logits: Float[Tensor, "rows vocab"],
    token_ids: Int[Tensor, " rows"],
    num_top: int,
    unlisted: Tensor | None,
) -> list[ScoredToken]:
    columns = sampling.score(logits, token_ids, num_top, unlisted)
    logprobs, ranks, top_logprobs, top_ids = (column.tolist() for column in columns)
    return [
        ScoredToken(token_id, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token_id, logprob, rank, values, ids in zip(
            token_ids.tolist(), logprobs, ranks, top_logprobs, top_ids, strict=True
        )
    ]


def _row_scores(
    logits: Float[Tensor, "rows vocab"],
    token_ids: Sequence[int],
    scored: dict[int, int],
    unlisted: Tensor | None,
) -> dict[int, RowScore]:
    if not scored:
        return {}
    wanted = torch.tensor([token_ids[index] for index in scored], device=logits.device)
    found = _score(logits[list(scored)], wanted, max(scored.values()), unlisted)
    return {
        index: RowScore(score.logprob, score.rank, score.top_logprobs[:num_top])
        for (index, num_top), score in zip(scored.items(), found, strict=True)
    }


def _report(
    token_ids: Sequence[int], scores: dict[int, RowScore], errors: dict[int, str]
) -> list[SampledToken]:
    tokens = [SampledToken(token_id) for token_id in token_ids]
    for index, score in scores.items():
        token_id = token_ids[index]
        tokens[index] = SampledToken(token_id, score.logprob, score.top, score.rank)
    for index, error in errors.items():
        tokens[index] = SampledToken(NO_TOKEN, error=error)
    return tokens
