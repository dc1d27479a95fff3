"""A Transformers cache in Quire's pages, with any eviction rule, for `model.generate`."""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.engine.codec import stored_as
from quire.engine.pool import check_pre_rope
from quire.errors import ConfigError, RequestError
from quire.eviction.eviction_rules import EvictionRules
from quire.eviction.rule_requirements import NONE
from quire.hf.arguments import (
    check_positions,
    count_new_tokens,
    refuse_unread,
    wanted_columns,
    without_cached,
)
from quire.hf.cache_memory import MemoryOptions, folder_of, make_layout, make_memory
from quire.hf.evicting import Evicting, make_rule
from quire.hf.layerless import CacheWithoutLayers
from quire.hf.rollback import Rollback
from quire.hf.sequences import Sequences, start_rows
from quire.hf.wrapped import ForwardingCache, wrap_model
from quire.kv.lane_reader import LaneReader
from quire.kv.step import PagedKV


class QuireCache(CacheWithoutLayers, ForwardingCache):
    """KV in pages of a fixed memory; an eviction rule removes tokens permanently.

        with QuireCache(model, policy="h2o:recent=64", budget=512) as cache:
            model.generate(**inputs, past_key_values=cache)

    While the cache is open, forwards of the model with this cache run with Quire's attention; all
    others are unchanged. Rows of a batch may be padded on the left; pads take no slots.

    Args:
        model: a causal language model of Transformers, in eval mode, on one device.
        policy: an eviction rule with its options, such as `snapkv:window=32`; `full` retains all
            tokens.
        budget: limit of a lane (one KV head of one layer): tokens, "25%" of the prompt, or bytes
            of a sequence such as "2MiB".
        when: prefill_and_decode (the default), prefill_end, decode or pressure; see
            `quire.layout.eviction`.
        every: tokens evicted at a time; None: an eighth of the budget, at most 64.
        compression_ratio: in place of `budget`, the fraction of the prompt's tokens to remove, as
            in kvpress: 0.75 is the budget "25%". 0 retains all tokens. kvpress evicts once, after
            the prompt, which is when="prefill_end".
        codec: codec of keys and values, as in `--kv-codec`: none (as computed by the model), or a
            name such as int8 or int4+residual=64.
        constants: folder with codec constants measured by quire calibrate; None: the folder that
            the model was loaded from.
        memory: KV memory of all rows, in bytes or as "64MiB"; None: the maximum that the batch
            needs under its budget, at most nine tenths of the free memory.
        max_tokens: maximum length of a sequence, prompt and output; None: the model's context.
            Required for models with long RoPE, since it selects their frequencies.
        page_tokens: number of slots of a page.
        attention: attention backend: auto, native, gathered or reference.
        verify: compare a short prompt with Transformers' own attention first.

    Raises:
        ConfigError: an unknown name, a codec that the model or device does not support, a budget
            the number of protected tokens, a model that is in training mode or belongs to an
            engine.
        UnsoundCombination: a rule and a codec that exclude each other, or `streaming` with a model
            whose RoPE is unknown.
        UnsupportedModel: its attention does not work with pages; states the reason.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option
        self,
        model: PreTrainedModel,
        policy: str = "full",
        budget: int | str | None = None,
        *,
        when: str | None = None,
        every: int | None = None,
        compression_ratio: float | None = None,
        codec: str = "none",
        constants: str | None = None,
        memory: int | str | None = None,
        max_tokens: int | None = None,
        page_tokens: int = 16,
        attention: str = "auto",
        verify: bool = True,
    ) -> None:
        super().__init__()
        self._rule = make_rule(policy, budget, when, every, compression_ratio)
        self._decoder = wrap_model(model, verify=verify)
        self._closing = weakref.finalize(self, self._decoder.leave)
        self._closing.atexit = False
        try:
            spec = self._decoder.spec
            self._options = MemoryOptions(
                memory=memory,
                max_tokens=max_tokens or spec.max_positions,
                page_tokens=page_tokens,
                attention=attention,
            )
            self._stored = stored_as(
                codec,
                self._decoder,
                spec,
                constants=constants or "",
                folder=folder_of(model),
            )
            self._rules = EvictionRules(
                self._rule.text,
                NONE,
                model=spec,
                page_tokens=page_tokens,
                codec=self._stored.codec,
                why_not=self._decoder.prepare,
            )
            check_pre_rope(self._decoder, self._rules)
            self._layout = make_layout(spec, self._stored.codec, self._rules, page_tokens)
            self._rope_variant = self._variant_for(max_tokens)
        except BaseException:
            self._closing()
            raise
        self._limit = max_tokens
        self._kv: PagedKV | None = None
        self._sequences: Sequences | None = None
        self._rollback = Rollback(self._layout)
        self._columns = self._max_rows = 0

    def _variant_for(self, max_tokens: int | None) -> int:
        if self._decoder.num_rope_variants > 1 and max_tokens is None:
            raise ConfigError(
                f"{self._decoder.spec.architecture} has different rotary frequencies for long and "
                "short sequences: pass max_tokens=, the maximum length of prompt and output, which "
                "selects them for all sequences"
            )
        longest = self._options.max_tokens
        if self._rules.rerotates_keys:  # no position reaches the lane's capacity
            lanes = self._rules.lanes_of(self._rule)
            longest = self._rule.for_request(longest, lanes).spec.peak_tokens(longest, longest)
        return self._decoder.rope_variant(longest)

    # ---- contents ------------------------------------------------------------------------------

    @property
    def kv_used_bytes(self) -> int:
        """Bytes of pages in use, statistics included."""
        pools = self._kv.memory.pools.values() if self._kv else ()
        return sum(pool.used_bytes for pool in pools)

    @property
    def kv_peak_bytes(self) -> int:
        """Peak bytes in use since the last `reset`."""
        return self._kv.memory.arena_peak_bytes if self._kv else 0

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first forward."""
        return len(self._sequences.rows) if self._sequences else -1

    def retained_positions(self, row: int, layer: int) -> list[list[int]]:
        """Positions in the row's sequence that are still cached, ascending, for each KV head.

        Position 0 is a row's first token; pads have no position.
        """
        kv, sequences = self._open_rows()
        return retained_positions(kv, sequences.rows[row].memory.row, layer)

    def _open_rows(self) -> tuple[PagedKV, Sequences]:
        if self._kv is None or self._sequences is None:
            raise RequestError("this cache is empty: no forward has used it yet")
        return self._kv, self._sequences

    # ---- a forward -----------------------------------------------------------------------------

    @torch.no_grad()
    def run_forward(
        self, arguments: Mapping[str, object]
    ) -> CausalLMOutputWithPast | tuple[object, ...]:
        """Run `model(**arguments)` with this cache; called by the model's forward.

        If an error occurs while tokens are processed, the cache is emptied.

        Raises:
            RequestError: inputs that a cache in pages does not support; states the reason.
            OutOfPages: the memory is too small; states the shortage.
            PolicyError: the rule broke its contract.
        """
        self.require_open()
        refuse_unread(arguments)
        token_ids = arguments.get("input_ids")
        if not isinstance(token_ids, Tensor) or token_ids.ndim != 2:
            raise RequestError("expected input_ids [rows, columns]")
        held = self._lengths(token_ids.shape[0])
        position_ids = arguments.get("position_ids")
        if self._rollback.active:
            token_ids, position_ids = without_cached(token_ids, position_ids, self._columns)
        columns = token_ids.shape[1]
        counts = count_new_tokens(arguments.get("attention_mask"), columns, self._columns, held)
        if isinstance(position_ids, Tensor):
            check_positions(position_ids, counts, held)
        kept = arguments.get("logits_to_keep", 0)
        wanted = wanted_columns(kept, columns)
        self._check_length(int((np.array(held) + counts).max()))
        candidates = self._num_candidates(kept, columns)
        sequences = self._sequences or self._begin((counts - candidates).tolist())
        try:
            logits = self._process(sequences, token_ids, counts, wanted, candidates)
        except BaseException:
            self.reset()  # rows may have processed different numbers of tokens
            raise
        self._columns += columns
        output = CausalLMOutputWithPast(logits=logits, past_key_values=self)
        return output.to_tuple() if arguments.get("return_dict") is False else output

    def _num_candidates(self, kept: object, columns: int) -> int:
        """Number of last columns that may be removed again: assisted decoding's candidates."""
        if not self._rollback.active or not isinstance(kept, int):
            return 0
        return (kept or columns) - 1

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
        firm = token_ids.shape[1] - candidates  # columns that stay
        pending = self._rollback.num_pending
        ids = self._rollback.take_pending(token_ids)
        whole, columns = counts + np.int32(pending), wanted + pending
        if self._columns and firm > 1:
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

    def _begin_turn(self, sequences: Sequences, counts: NDArray[np.int32]) -> None:
        """The next tokens are a prompt: the next message of a conversation."""
        lanes = self._rules.lanes_of(self._rule)
        totals = np.array(sequences.lengths) + counts
        evictions = [self._rule.for_request(int(tokens), lanes) for tokens in totals]
        sequences.begin_turn(evictions, counts)

    def require_open(self) -> None:
        """Raise ConfigError for a cache that was closed."""
        if not self._closing.alive:
            raise ConfigError("this QuireCache is closed; create a new one")

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
        if self._limit is not None and longest > self._limit:
            raise RequestError(
                f"a sequence of {longest} tokens exceeds max_tokens={self._limit}; create the "
                "cache with a larger value"
            )

    def _begin(self, prompts: list[int]) -> Sequences:
        lanes = self._rules.lanes_of(self._rule)
        evictions = [self._rule.for_request(tokens, lanes) for tokens in prompts]
        if self._kv is None or len(prompts) > self._max_rows:
            self._max_rows = len(prompts)
            largest = max((eviction.spec for eviction in evictions), key=lambda spec: spec.cap or 0)
            rows_held = len(prompts) * (1 + self._rollback.forks_rows)
            self._kv = make_memory(
                self._decoder, self._layout, self._stored, rows_held, largest, self._options
            )
        rows = start_rows(self._kv.memory, self._rule, evictions, prompts, self._rope_variant)
        evicting = Evicting(self._decoder, self._kv, self._rules)
        self._sequences = Sequences(self._decoder, self._kv, evicting, self._rule, rows)
        return self._sequences

    # ---- Transformers' cache interface ---------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, pads and evicted tokens included."""
        del layer_idx
        return self._columns

    # ---- rows ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Free all rows; the memory is retained for the next batch of equal size."""
        if self._kv is None or self._sequences is None:
            return
        self._rollback.forget(self._sequences)
        self._rollback.pending = None
        self._sequences.close()
        self._sequences, self._columns = None, 0
        self._kv.memory.arena_peak_bytes = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows for beam search; copies of a row share its pages."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows in this order."""
        _, sequences = self._open_rows()
        sequences.select([int(index) for index in indices.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; the copies share its pages."""
        _, sequences = self._open_rows()
        sequences.select([i for i in range(len(sequences.rows)) for _ in range(repeats)])

    @property
    def is_croppable(self) -> bool:
        """True: see `crop`."""
        return True

    def activate_past_recording(self) -> None:
        """Make the candidates of each later forward removable; called by assisted decoding.

        The last `logits_to_keep - 1` tokens of a forward are its candidates.
        """
        self.require_open()
        if self._kv is not None and self._sequences is None and not self._rollback.forks_rows:
            self._kv = None  # the forks need more memory
        self._rollback.active = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every row.

        Args:
            tokens_to_remove: negative number of tokens, as in Transformers; 0 removes none and
                accepts the candidates of the last forward.

        Raises:
            RequestError: a positive number, or more tokens than a row holds.
            UnsoundCombination: the state before these tokens is not available; states the reason.
        """
        if tokens_to_remove > 0:
            raise RequestError(
                f"expected the negative number of tokens to remove, got {tokens_to_remove}"
            )
        if self._sequences is None:
            return
        if -tokens_to_remove > min(self._lengths(self.batch_size)):
            raise RequestError(
                f"expected at most {min(self._lengths(self.batch_size))} tokens to remove, the "
                f"length of the shortest row, got {-tokens_to_remove}"
            )
        self._rollback.crop(self._sequences, -tokens_to_remove)
        self._columns += tokens_to_remove

    # ---- close ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory; closing a model's last cache restores the model."""
        self._sequences = self._kv = None
        self._columns = 0
        self._closing()

    def __enter__(self) -> "QuireCache":
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"QuireCache({self._rule.text!r}, {self.kv_used_bytes:,} B in use)"


# ---- retained ------------------------------------------------------------------------------------

# Positions that a row retains in each head.


def retained_positions(kv: PagedKV, row: int, layer: int) -> list[list[int]]:
    """Positions in the lanes of a layer, ascending, for each KV head.

    Args:
        kv: the paged KV of the cache.
        row: row of the memory.
        layer: index of the layer.
    """
    group, index = kv.place[layer]
    reader = LaneReader(kv, group.name, row, range(index, index + 1))
    return [[position for position in head if position >= 0] for head in reader.positions.tolist()]
