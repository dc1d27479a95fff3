"""A Transformers cache in Quire's pages, with any eviction rule, for `model.generate`."""

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.config.kv_config import parse_policy_file
from quire.engine.kv_memory import stored_as
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.eviction.eviction_rules import (
    NONE,
    EvictionRules,
    Provided,
    check_pre_rope,
    first_served,
    unless_scored,
)
from quire.hf.cache_memory import MemoryOptions, make_layout
from quire.hf.cache_rows import CachePlan, CacheRows, refuse_unread, rope_variant
from quire.hf.evicting import rule_text
from quire.kv.lane_reader import LaneReader
from quire.kv.paged_kv import PagedKV
from quire.layout import limits
from quire.models.wrapped import ForwardingCache, folder_of, output_with_cache, wrap_model
from quire.policies.registry import load_policy_file


class CacheWithoutLayers(Cache):
    """A `Cache` without layers of tensors: keys and values are not returned."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @abstractmethod
    def require_open(self) -> None: ...

    @property
    def is_linear(self) -> list[bool]:
        """No linear attention: all tokens are cached, and `generate` passes only the new ones.

        Transformers 5.24 reads it; an empty list would mean that all layers are linear.
        """
        return [False]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum length."""
        del layer_idx
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The older name of `get_max_length`."""
        del layer_idx
        return -1

    def get_mask_sizes(self, query_length: object, layer_idx: int = 0) -> NoReturn:
        """Refused: paged attention needs no mask."""
        del query_length, layer_idx
        raise self._wrong_call()

    def update(self, *arguments: object, **options: object) -> NoReturn:
        """Refused: keys and values are stored by Quire's attention."""
        del arguments, options
        raise self._wrong_call()

    def _wrong_call(self) -> ConfigError:
        self.require_open()
        return ConfigError(
            "a QuireCache works only in model(...) and model.generate(...) of the model it was "
            "created for; it was passed to another model or to a submodule"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refused: two caches cannot own one memory."""
        raise UnsoundCombination(
            "a QuireCache cannot be copied; use batch_repeat_interleave to share a prompt"
        )


class QuireCache(CacheWithoutLayers, ForwardingCache):
    """KV in pages of a fixed memory; an eviction rule removes tokens permanently.

        with QuireCache(model, policy="h2o:recent=64", budget=512) as cache:
            model.generate(**inputs, cache=cache)

    Before Transformers 5.24 the argument is called `past_key_values`.
    While the cache is open, forwards of the model with this cache run with Quire's attention; all
    others are unchanged. Rows of a batch may be padded on the left; pads take no slots.

    Args:
        model: a causal language model of Transformers, in eval mode, on one device.
        policy: an eviction rule with its options, such as `snapkv:window=32`; `full` retains all
            tokens.
        policy_file: Python file that registers the rule, if the process has not imported it.
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
        policy_file: str | Path = "",
        verify: bool = True,
    ) -> None:
        super().__init__()
        load_policy_file(parse_policy_file(policy_file))
        text = rule_text(policy, budget, when, every, compression_ratio)
        self._decoder = wrap_model(model, verify=verify)
        self._closing = weakref.finalize(self, self._decoder.leave)
        self._closing.atexit = False
        try:
            spec = self._decoder.spec
            options = MemoryOptions(
                memory=memory,
                max_tokens=max_tokens or spec.max_positions,
                page_tokens=page_tokens,
                attention=attention,
            )
            folder = folder_of(model)
            stored = stored_as(
                codec,
                self._decoder,
                spec,
                constants=constants or "",
                folder=folder,
                argument=str(folder or "MODEL"),
            )
            provided = Provided(
                unless_scored(self._decoder.prepare, limits.SCORED_IN_TRANSFORMERS),
                projection=self._decoder.output_projections,
            )
            rules = first_served(
                text,
                lambda evict: EvictionRules(
                    evict,
                    NONE,
                    model=spec,
                    page_tokens=page_tokens,
                    codec=stored.codec,
                    provided=provided,
                ),
            )
            self._rule = rules.default
            check_pre_rope(rules, self._decoder.prepare_pre_rope)
            layout = make_layout(spec, stored.codec, rules, page_tokens)
            variant = rope_variant(self._decoder, rules, self._rule, options, max_tokens)
        except BaseException:
            self._closing()
            raise
        plan = CachePlan(
            decoder=self._decoder,
            rule=self._rule,
            rules=rules,
            layout=layout,
            stored=stored,
            options=options,
            rope_variant=variant,
            limit=max_tokens,
        )
        self._rows = CacheRows(plan)

    # ---- contents ------------------------------------------------------------------------------

    @property
    def kv_used_bytes(self) -> int:
        """Bytes of pages in use, statistics included."""
        kv = self._rows.kv
        pools = kv.memory.pools.values() if kv else ()
        return sum(pool.used_bytes for pool in pools)

    @property
    def kv_peak_bytes(self) -> int:
        """Peak bytes in use since the last `reset`."""
        kv = self._rows.kv
        return kv.memory.arena_peak_bytes if kv else 0

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first forward."""
        return self._rows.batch_size

    def retained_positions(self, row: int, layer: int) -> list[list[int]]:
        """Positions in the row's sequence that are still cached, ascending, for each KV head.

        Position 0 is a row's first token; pads have no position.
        """
        kv, sequences = self._rows.opened()
        return retained_positions(kv, sequences.rows[row].memory.row, layer)

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
        logits = self._rows.forward(token_ids, arguments)
        output = output_with_cache(logits, self)
        return output.to_tuple() if arguments.get("return_dict") is False else output

    def require_open(self) -> None:
        if not self._closing.alive:
            raise ConfigError("this QuireCache is closed; create a new one")

    # ---- Transformers' cache interface ---------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, pads and evicted tokens included."""
        del layer_idx
        return self._rows.columns

    # ---- rows ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Free all rows; the memory is retained for the next batch of equal size."""
        self._rows.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows for beam search; copies of a row share its pages."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows in this order."""
        self._rows.select([int(index) for index in indices.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; the copies share its pages."""
        self._rows.select([i for i in range(self.batch_size) for _ in range(repeats)])

    @property
    def is_croppable(self) -> bool:
        """True: see `crop`."""
        return True

    def activate_past_recording(self) -> None:
        """Make the candidates of each later forward removable; called by assisted decoding.

        The last `logits_to_keep - 1` tokens of a forward are its candidates.
        """
        self.require_open()
        self._rows.activate_rollback()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every row.

        Args:
            tokens_to_remove: negative number of tokens, as in Transformers; 0 removes none and
                accepts the candidates of the last forward.

        Raises:
            RequestError: a positive number, or more tokens than a row holds.
            UnsoundCombination: the state before these tokens is not available; states the reason.
        """
        self._rows.crop(tokens_to_remove)

    # ---- close ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory; closing a model's last cache restores the model."""
        self._rows.close()
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
    """Positions in the lanes of a layer, ascending, for each KV head."""
    group, index = kv.place[layer]
    reader = LaneReader(kv, group.name, row, range(index, index + 1))
    return [[position for position in head if position >= 0] for head in reader.positions.tolist()]
