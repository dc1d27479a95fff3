"""The rows of a cache over its life: forwards, turns of a conversation, candidates, crop, reset."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.codec import StoredAs
from quire.errors import ConfigError, RequestError
from quire.eviction.eviction_rules import EvictionRules
from quire.hf.arguments import (
    check_positions,
    count_new_tokens,
    wanted_columns,
    without_cached,
)
from quire.hf.cache_memory import MemoryOptions, make_memory
from quire.hf.evicting import Evicting
from quire.hf.rollback import Rollback
from quire.hf.sequences import Sequences, start_rows
from quire.hf.wrapped import WrappedModel
from quire.kv.step import PagedKV
from quire.layout.pages import CacheLayout
from quire.policies.eviction import EvictionRule


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The resolved options of a cache.

    Attributes:
        decoder: the model.
        rule: eviction rule of all rows.
        rules: the rule and its statistics, for the memory.
        layout: layout of each sequence.
        stored: storage format of keys and values.
        options: size and pages of the memory.
        rope_variant: RoPE scaling variant of all rows.
        limit: maximum length of a sequence; None if it was not set.
    """

    decoder: WrappedModel
    rule: EvictionRule
    rules: EvictionRules
    layout: CacheLayout
    stored: StoredAs
    options: MemoryOptions
    rope_variant: int
    limit: int | None


def rope_variant(
    decoder: WrappedModel,
    rules: EvictionRules,
    rule: EvictionRule,
    options: MemoryOptions,
    limit: int | None,
) -> int:
    """RoPE scaling variant of all sequences of a cache.

    Raises:
        ConfigError: the model has several variants and no maximum length was set.
    """
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

    Args:
        plan: the resolved options.

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
        """The KV and its rows.

        Raises:
            RequestError: no forward has used the cache yet.
        """
        if self.kv is None or self._sequences is None:
            raise RequestError("this cache is empty: no forward has used it yet")
        return self.kv, self._sequences

    # ---- a forward -----------------------------------------------------------------------------

    def forward(
        self, token_ids: Int[Tensor, "batch columns"], arguments: Mapping[str, object]
    ) -> Float[Tensor, "batch wanted vocab"]:
        """Process the tokens of a forward; if an error occurs meanwhile, all rows are freed.

        Args:
            token_ids: its `input_ids`.
            arguments: all of its arguments.

        Raises:
            RequestError: inputs that a cache in pages does not support; states the reason.
            OutOfPages: the memory is too small; states the shortage.
            PolicyError: the rule broke its contract.
        """
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
        self._check_length(int((np.array(held) + counts).max()))
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
        """Process new tokens and those pending; see `Sequences.process`.

        Args:
            sequences: the rows.
            token_ids: the last `counts` tokens of each row are new.
            counts: new tokens of each row.
            wanted: columns whose logits are returned.
            candidates: last columns that may be removed again.
        """
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

    def _check_length(self, longest: int) -> None:
        limit = self._plan.limit
        if limit is not None and longest > limit:
            raise RequestError(
                f"a sequence of {longest} tokens exceeds max_tokens={limit}; create the cache with "
                "a larger value"
            )

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
        """Select rows in this order; see `Sequences.select`."""
        _, sequences = self.opened()
        self._rollback.select(sequences, indices)
        sequences.select(indices)

    def activate_rollback(self) -> None:
        """Make the candidates of each later forward removable."""
        if self._sequences is None and not self._rollback.active:
            self.kv = None  # the forks need more memory
        self._rollback.active = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every row; see `QuireCache.crop`."""
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
        """Free the memory."""
        self._sequences = self.kv = None
        self.columns = 0
