"""The rows of a cache over its life: forwards, turns of a conversation, candidates, crop, reset.

Arguments of a forward: the new tokens of a batch that is padded on the left.

    input_ids        . . a b c      attention_mask   0 0 1 1 1       a row's new tokens are the last
                     d e f g h                       1 1 1 1 1       `counts[row]` columns: 3 and 5

Pads must be on the left. They have no slots and no positions, and no token attends to them.

Removal of the last tokens of a cache: crop, and the rejected tokens of assisted decoding.

    forward     [accepted tokens][candidates]      the rows are forked before the candidates
    crop(-k)    [accepted tokens][candidates]      back to the fork; the accepted candidates are
                                  ^^^^^^ kept      processed together with the next tokens

An evicted token cannot be recovered, and statistics cannot be subtracted. So the rows are forked,
and candidates that were accepted are processed a second time. The cache is then the same as if the
rejected tokens had never been passed. Where all layers retain all tokens, without statistics, the
rows are truncated instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.kv_memory import StoredAs
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.eviction.eviction_rules import EvictionRules
from quire.hf.cache_memory import MemoryOptions, make_memory
from quire.hf.evicting import Evicting
from quire.hf.sequences import Sequences, start_rows
from quire.kv.paged_kv import PagedKV
from quire.layout.pages import CacheLayout
from quire.models.wrapped import WrappedModel
from quire.policies.eviction import EvictionRule
from quire.scheduler.request import Request

_READ = frozenset({"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache"})
_HARMLESS = frozenset({"return_dict", "cache_position"})


def count_new_tokens(
    attention_mask: object, columns: int, past_columns: int, lengths: Sequence[int]
) -> NDArray[np.int32]:
    """Count the new tokens of each row, pads excluded."""
    rows = len(lengths)
    if attention_mask is None:
        return np.full(rows, columns, dtype=np.int32)
    shape = (rows, past_columns + columns)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        got = (
            list(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise RequestError(
            f"expected an attention_mask {list(shape)} for the cached and the new tokens, "
            f"1 for a token and 0 for a pad, got {got}"
        )
    seen = attention_mask != 0
    new = seen[:, past_columns:]
    gaps = (new[:, :-1] & ~new[:, 1:]).any(dim=1)  # a pad after a token
    numbers = torch.stack([seen[:, :past_columns].sum(1), new.sum(1), gaps.long()])
    past, counts, gap = numbers.cpu().numpy()
    held = np.array(lengths)
    if gap.any() or ((held > 0) & (counts < columns)).any():
        raise RequestError(
            "expected a batch padded on the left, got pads after or between the tokens of a row; "
            "set tokenizer.padding_side = 'left'"
        )
    if (past != held).any():
        raise RequestError(
            f"the attention_mask has {past.tolist()} previous tokens, but {held.tolist()} are "
            "cached, and cached tokens cannot be masked; call cache.reset() before other prompts"
        )
    counted: NDArray[np.int32] = counts.astype(np.int32)
    return counted


def check_positions(
    position_ids: Int[Tensor, "batch columns"],
    counts: NDArray[np.int32],
    lengths: Sequence[int],
) -> None:
    """Refuse positions other than 0, 1, 2, ... in each row; the cache counts positions itself."""
    columns = position_ids.shape[1]
    first = torch.tensor(
        [length + int(count) - columns for length, count in zip(lengths, counts, strict=True)],
        device=position_ids.device,
    )
    column = torch.arange(columns, device=position_ids.device)
    new = column >= columns - torch.from_numpy(counts).to(position_ids.device)[:, None]
    wrong = ((position_ids != first[:, None] + column) & new).any(dim=1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise RequestError(
            f"expected consecutive position_ids from {lengths[row]} in row {row}; omit "
            "position_ids, pass an attention_mask if rows are padded, or call cache.reset() before "
            "other prompts"
        )


def without_cached(
    token_ids: Int[Tensor, "batch columns"], position_ids: object, past_columns: int
) -> tuple[Tensor, object]:
    """Drop tokens that are cached already from the first forward of assisted decoding.

    Transformers 5.23 passes the whole sequence again if its cache already holds a part of it, as in
    the second turn of a conversation.
    """
    again = isinstance(position_ids, Tensor) and past_columns and int(position_ids[0, 0]) == 0
    if not again or token_ids.shape[0] != 1 or token_ids.shape[1] <= past_columns:
        return token_ids, position_ids
    assert isinstance(position_ids, Tensor), "checked above"
    return token_ids[:, past_columns:], position_ids[:, past_columns:]


def wanted_columns(logits_to_keep: object, columns: int) -> NDArray[np.int64]:
    """Columns whose logits are requested, by Transformers' definition of `logits_to_keep`."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1:
            raise RequestError(
                "expected logits_to_keep to be a number or one list of columns for all rows, got "
                f"a tensor {list(logits_to_keep.shape)}"
            )
        chosen: NDArray[np.int64] = np.arange(columns)[logits_to_keep.cpu().numpy()]
        return chosen
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise RequestError(f"expected logits_to_keep >= 0, got {logits_to_keep!r}")
    return np.arange(columns)[-logits_to_keep:]


def refuse_unread(arguments: Mapping[str, object]) -> None:
    """Refuse arguments that would change the output and are not supported."""
    if arguments.get("use_cache") is False:
        raise RequestError("use_cache=False and a cache exclude each other; remove one of them")
    if arguments.get("inputs_embeds") is not None:
        raise RequestError("expected input_ids: a QuireCache does not support inputs_embeds")
    for name, value in arguments.items():
        if name in _READ or name in _HARMLESS or value is None or value is False:
            continue
        raise RequestError(
            f"{name}={value!r:.40} is not supported with a QuireCache: prompts are prefilled in "
            "chunks without pads, and attention weights are not stored"
        )


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The rows of a batch before its newest tokens."""

    rows: list[Request]  # forks of the rows
    token_ids: Int[Tensor, "batch columns"]  # [rows, columns] processed since then


class Rollback:
    """Removes the last tokens of all rows.

    Attributes:
        active: whether candidates may be removed after each forward.
        pending: accepted tokens [rows, columns] that the rows do not hold yet; None if there are
            none.
    """

    def __init__(self, layout: CacheLayout) -> None:
        groups = layout.groups
        self._truncates = all(g.ordered and not g.private and not g.bounded for g in groups)
        self.active = False
        self.pending: Tensor | None = None
        self._checkpoint: ForkPoint | None = None

    @property
    def forks_rows(self) -> bool:
        """Whether candidates need forks of the rows."""
        return self.active and not self._truncates

    @property
    def num_pending(self) -> int:
        return 0 if self.pending is None else int(self.pending.shape[1])

    def take_pending(self, token_ids: Int[Tensor, "batch columns"]) -> Tensor:
        """Return the pending tokens followed by these; none are pending afterwards."""
        pending, self.pending = self.pending, None
        return token_ids if pending is None else torch.cat([pending, token_ids], dim=1)

    def save(self, sequences: Sequences, token_ids: Int[Tensor, "batch columns"]) -> None:
        """Fork the rows before these candidates are processed; nothing is changed on failure."""
        self.forget(sequences)
        if self.forks_rows and token_ids.shape[1]:
            self._checkpoint = ForkPoint(sequences.fork_rows(), token_ids)

    def forget(self, sequences: Sequences) -> None:
        """Free the forks: no tokens before this point will be removed."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            sequences.free(checkpoint.rows)

    def select(self, sequences: Sequences, indices: list[int]) -> None:
        """Select rows of the pending tokens; the candidates of the last forward are accepted."""
        self.forget(sequences)
        if self.pending is not None:
            self.pending = self.pending[indices]

    def reset(self, sequences: Sequences) -> None:
        self.forget(sequences)
        self.pending = None

    def crop(self, sequences: Sequences, tokens: int) -> None:
        pending = self.num_pending
        if pending >= tokens > 0 and self.pending is not None:
            self.pending = self.pending[:, : pending - tokens]
            return
        if self._checkpoint is None:
            self.pending = None
            self._truncate(sequences, tokens - pending)
            return
        self._restore(sequences, self._checkpoint, tokens)

    def _restore(self, sequences: Sequences, checkpoint: ForkPoint, tokens: int) -> None:
        if not tokens:
            self.forget(sequences)
            return
        candidates = int(checkpoint.token_ids.shape[1])
        if tokens > candidates:
            raise UnsoundCombination(
                f"expected to remove at most the {candidates} tokens of the last forward, got "
                f"{tokens}; call cache.reset() and prefill again"
            )
        self._checkpoint = None
        sequences.roll_back(checkpoint.rows)
        accepted = checkpoint.token_ids[:, : candidates - tokens]
        self.pending = accepted if accepted.shape[1] else None

    def _truncate(self, sequences: Sequences, tokens: int) -> None:
        if not tokens:
            return
        evicted = any(row.eviction.num_evictions for row in sequences.rows)
        if evicted or any(row.memory.statistics for row in sequences.rows):
            raise UnsoundCombination(
                "evicted tokens, and statistics and recurrent states before the removed tokens, "
                "cannot be recovered; call "
                "cache.activate_past_recording() before the forward whose tokens are removed, as "
                "assisted decoding does, or cache.reset() and prefill again"
            )
        try:
            sequences.truncate(tokens)
        except ConfigError as error:
            raise UnsoundCombination(
                f"the last {tokens} tokens cannot be removed: {error}; call "
                "cache.activate_past_recording() before the forward whose tokens are removed"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The resolved options of a cache."""

    decoder: WrappedModel
    rule: EvictionRule
    rules: EvictionRules
    layout: CacheLayout
    stored: StoredAs  # storage format of keys and values
    options: MemoryOptions
    rope_variant: int
    limit: int | None  # of a sequence in tokens; None if it was not set


def rope_variant(
    decoder: WrappedModel,
    rules: EvictionRules,
    rule: EvictionRule,
    options: MemoryOptions,
    limit: int | None,
) -> int:
    """RoPE scaling variant of all sequences of a cache."""
    if decoder.num_rope_variants > 1 and limit is None:
        raise ConfigError(
            f"{decoder.spec.architecture} has different rotary frequencies for long and short "
            "sequences: pass max_tokens=, the maximum length of prompt and output, which selects "
            "them for all sequences"
        )
    longest = options.max_tokens
    if rules.rerotates_keys:  # no position reaches the lane's capacity
        spec = rule.for_request(longest, rules.lanes_of(rule)).spec
        longest = spec.peak_tokens(longest, longest)
    return decoder.rope_variant(longest)


class CacheRows:
    """The rows of a cache; there are none before the first forward.

    Attributes:
        kv: the paged KV; None before the first forward.
        columns: columns of the batch so far, pads and evicted tokens included.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.kv: PagedKV | None = None
        self.columns = 0
        self._plan, self._max_rows = plan, 0
        self._sequences: Sequences | None = None
        self._rollback = Rollback(plan.layout)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first forward."""
        return len(self._sequences.rows) if self._sequences else -1

    def opened(self) -> tuple[PagedKV, Sequences]:
        """The KV and its rows."""
        if self.kv is None or self._sequences is None:
            raise RequestError("this cache is empty: no forward has used it yet")
        return self.kv, self._sequences

    # ---- a forward -----------------------------------------------------------------------------

    def forward(
        self, token_ids: Int[Tensor, "batch columns"], arguments: Mapping[str, object]
    ) -> Float[Tensor, "batch wanted vocab"]:
        """Process the tokens of a forward; if an error occurs meanwhile, all rows are freed."""
        held = self._lengths(token_ids.shape[0])
        position_ids = arguments.get("position_ids")
        if self._rollback.active:
            token_ids, position_ids = without_cached(token_ids, position_ids, self.columns)
        columns = token_ids.shape[1]
        counts = count_new_tokens(arguments.get("attention_mask"), columns, self.columns, held)
        if isinstance(position_ids, Tensor):
            check_positions(position_ids, counts, held)
        kept = arguments.get("logits_to_keep", 0)
        wanted = wanted_columns(kept, columns)
        longest = int((np.array(held) + counts).max())
        limit = self._plan.limit
        if limit is not None and longest > limit:
            raise RequestError(
                f"a sequence of {longest} tokens exceeds max_tokens={limit}; create the cache with "
                "a larger value"
            )
        candidates = self._num_candidates(kept, counts)
        sequences = self._sequences or self._begin((counts - candidates).tolist())
        try:
            logits = self._process(sequences, token_ids, counts, wanted, candidates)
        except BaseException:
            self.reset()  # rows may have processed different numbers of tokens
            raise
        self.columns += columns
        return logits

    def _num_candidates(self, kept: object, counts: NDArray[np.int32]) -> int:
        """Number of last columns that may be removed again: assisted decoding's candidates."""
        if not self._rollback.active or not isinstance(kept, int):
            return 0
        if not kept and not self.columns:
            return 0  # a prompt whose logits are all returned
        shortest = int(counts.min())
        return max(0, min(kept or shortest, shortest) - 1)

    def _process(
        self,
        sequences: Sequences,
        token_ids: Int[Tensor, "batch columns"],
        counts: NDArray[np.int32],
        wanted: NDArray[np.int64],
        candidates: int,
    ) -> Float[Tensor, "batch wanted vocab"]:
        """Process new tokens and those pending; see `Sequences.process`."""
        pending = self._rollback.num_pending
        ids = self._rollback.take_pending(token_ids)
        whole, columns = counts + np.int32(pending), wanted + pending
        if self.columns and token_ids.shape[1] - candidates > 1:  # a turn of a conversation
            if pending:
                sequences.process(ids[:, :pending], whole * 0 + pending, columns[:0])
            self._begin_turn(sequences, counts - candidates)
            ids, whole, columns = token_ids, counts, wanted
        split = ids.shape[1] - candidates
        first = sequences.process(ids[:, :split], whole - candidates, columns[columns < split])
        self._rollback.save(sequences, ids[:, split:])
        if not candidates:
            return first
        rest = columns[columns >= split] - split
        last = sequences.process(ids[:, split:], whole * 0 + candidates, rest)
        return torch.cat([first, last], dim=1)

    def _lengths(self, rows: int) -> list[int]:
        if self._sequences is None:
            return [0] * rows
        if rows != self.batch_size:
            raise RequestError(
                f"this cache holds {self.batch_size} rows, the batch has {rows}; call "
                "cache.reset() before another batch"
            )
        return [length + self._rollback.num_pending for length in self._sequences.lengths]

    # ---- prompts -------------------------------------------------------------------------------

    def _begin(self, prompts: list[int]) -> Sequences:
        plan = self._plan
        lanes = plan.rules.lanes_of(plan.rule)
        evictions = [plan.rule.for_request(tokens, lanes) for tokens in prompts]
        if self.kv is None or len(prompts) > self._max_rows:
            self._max_rows = len(prompts)
            largest = max((eviction.spec for eviction in evictions), key=lambda spec: spec.cap or 0)
            rows_held = len(prompts) * (1 + self._rollback.forks_rows)
            self.kv = make_memory(
                plan.decoder, plan.layout, plan.stored, rows_held, largest, plan.options
            )
        rows = start_rows(self.kv.memory, plan.rule, evictions, prompts, plan.rope_variant)
        evicting = Evicting(plan.decoder, self.kv, plan.rules)
        self._sequences = Sequences(plan.decoder, self.kv, evicting, plan.rule, rows)
        return self._sequences

    def _begin_turn(self, sequences: Sequences, counts: NDArray[np.int32]) -> None:
        """The next tokens are a prompt: the next message of a conversation."""
        plan = self._plan
        lanes = plan.rules.lanes_of(plan.rule)
        totals = np.array(sequences.lengths) + counts
        evictions = [plan.rule.for_request(int(tokens), lanes) for tokens in totals]
        sequences.begin_turn(evictions, counts)

    # ---- rows ----------------------------------------------------------------------------------

    def select(self, indices: list[int]) -> None:
        _, sequences = self.opened()
        self._rollback.select(sequences, indices)
        sequences.select(indices)

    def activate_rollback(self) -> None:
        if self._sequences is None and not self._rollback.active:
            self.kv = None  # the forks need more memory
        self._rollback.active = True

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise RequestError(
                f"expected the negative number of tokens to remove, got {tokens_to_remove}"
            )
        if self._sequences is None:
            return
        shortest = min(self._lengths(self.batch_size))
        if -tokens_to_remove > shortest:
            raise RequestError(
                f"expected at most {shortest} tokens to remove, the length of the shortest row, "
                f"got {-tokens_to_remove}"
            )
        self._rollback.crop(self._sequences, -tokens_to_remove)
        self.columns += tokens_to_remove

    def reset(self) -> None:
        """Free all rows; the memory is retained for the next batch of equal size."""
        if self.kv is None or self._sequences is None:
            return
        self._rollback.reset(self._sequences)
        self._sequences.close()
        self._sequences, self.columns = None, 0
        self.kv.memory.arena_peak_bytes = 0

    def close(self) -> None:
        self._sequences = self.kv = None
        self.columns = 0
