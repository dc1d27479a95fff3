"""A Transformers model over slabs: prefill and batched decoding by its ordinary forward."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from quire.errors import ConfigError, UnsupportedModel
from quire.kv.dense.row import NOTHING, KVShape, LayerShape
from quire.kv.dense.slab import DenseSlab, SlabRows
from quire.layout.limits import SPARSE, unsupported
from quire.models.bridge import reads_cache_length
from quire.models.own_attention import selects_tokens
from quire.models.rope import refuse_dynamic
from quire.models.wrapped import cache_argument


class SlabLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a slab.

    Args:
        slab: the slab.
        layer: its layer with the keys and values.
        index: its layer with the index keys; None: it has none.
    """

    is_sliding = False

    def __init__(self, slab: DenseSlab | SlabRows, layer: int, index: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slab, self._layer, self._index = slab, layer, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slab is already allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        return self._slab.append(self._layer, key_states, value_states)

    def update_indexer(
        self, indexer_key_states: Float[Tensor, "rows new_column dim"]
    ) -> Float[Tensor, "rows column dim"]:
        """Write the new columns' index keys; those of all columns in use."""
        assert self._index is not None, "the model has cached such keys in `_measure`"
        keys = indexer_key_states[:, None]
        return self._slab.append(self._index, keys, keys[..., :0])[0][:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns in attention, and the index of the first."""
        return self._slab.window.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._slab.window.width

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: rows are of different lengths."""
        del tokens_to_remove
        raise ConfigError("the cache of a DynamicBatch cannot be cropped")


class SlabCache(Cache):
    """All layers of a slab; `indexes` has the layer of the slab with the index keys of each."""

    def __init__(self, slab: DenseSlab | SlabRows, indexes: Sequence[int | None]) -> None:
        super().__init__(layers=[SlabLayer(slab, *layer) for layer in enumerate(indexes)])


# ---- masks ---------------------------------------------------------------------------------------

# Attention masks of a slab, computed from logical positions, never from columns.
#
#     a query at position p attends to a slot of its row at position s if s <= p and, in a layer
#     with a window of W tokens, s > p - W
#
# The query of a pad or of an empty row has no visible slot. It attends to its own column, since
# the softmax of an empty set is NaN.

FULL, SLIDING, SHARED = "full_attention", "sliding_attention", "dummy"
INDEXED = "indexed_attention"  # the model selects slots among the visible ones
_BOOLEAN, _ADDITIVE = "sdpa", "eager"

Masks = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The attention masks that a model needs."""

    kinds: frozenset[str]
    by_kind: bool  # whether the model takes one mask for each kind of layer
    window: int | None  # of sliding layers, in tokens

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "MaskRule":
        """Read a config as `create_masks_for_generate` does."""
        # layers that read the keys and values of others have the masks of their own kind
        kinds = frozenset(get_layer_types_and_kwargs(config)[0]) - {SHARED}
        others = kinds - {FULL, SLIDING, INDEXED}
        if others:
            raise UnsupportedModel(
                "expected layers of full, sliding or indexed attention, got "
                f"{config.model_type} with layers of {', '.join(sorted(others))}; use quire.LLM"
            )
        return cls(kinds, hasattr(config, "layer_types"), getattr(config, "sliding_window", None))

    def make(
        self,
        seen: Int[Tensor, "rows column"],
        new_columns: int,
        *,
        implementation: str,
        dtype: torch.dtype,
    ) -> Masks:
        """Masks [rows, 1, query, column] of a forward, True if a slot is visible."""
        masks = {
            kind: _form(
                visible(seen, new_columns, self.window if kind == SLIDING else None),
                implementation,
                dtype,
            )
            for kind in self.kinds
        }
        return masks if self.by_kind else next(iter(masks.values()))


def visible(
    seen: Int[Tensor, "rows column"], new_columns: int, window: int | None
) -> Bool[Tensor, "rows 1 query column"]:
    """Whether each query attends to each slot."""
    query = seen[:, -new_columns:, None]
    slot = seen[:, None, :]
    found = (slot != NOTHING) & (slot <= query)
    if window is not None:
        found &= slot > query - window
    column = torch.arange(seen.shape[1], device=seen.device)
    own = column[None, :] == column[-new_columns:, None]
    return (found | ((query == NOTHING) & own))[:, None]


def _form(found: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    if implementation == _BOOLEAN:
        return found
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=found.device)
    return torch.where(found, hidden.new_zeros(()), hidden)


def check_implementation(name: str | None) -> str:
    """Return the attention implementation if its masks are supported."""
    if name not in (_BOOLEAN, _ADDITIVE):
        raise UnsupportedModel(
            f"expected attn_implementation sdpa or eager, which accept a mask per row, got {name}; "
            "load the model with attn_implementation='sdpa'"
        )
    return name


_PAD = 0  # any token id: its KV is never attended to


class SlabModel:
    """A user's model, which is not modified.

    Attributes:
        shape: shape of a token's KV, measured by a forward of one token: the layers of the model,
            and then its index keys, each as a layer without values.
        vocab_size: number of tokens of the vocabulary.
        max_tokens: maximum length of a sequence in its config; None if unset.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.training:
            raise ConfigError("this model is in training mode: call model.eval() first")
        parameters = inspect.signature(type(model).forward).parameters
        self._config = model.config.get_text_config(decoder=True)
        self._cache_argument = _refuse(model, tuple(parameters), self._config)
        self._model = model
        self._masks = MaskRule.of(self._config)
        if INDEXED in self._masks.kinds and not selects_tokens(type(model)):
            raise unsupported(self._config.model_type, SPARSE)
        self._keeps_some = "logits_to_keep" in parameters
        self.vocab_size: int = self._config.vocab_size
        self.max_tokens: int | None = getattr(self._config, "max_position_embeddings", None)
        self.shape, self._indexes = self._measure()
        check_implementation(self._config._attn_implementation)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        found = getattr(self._model.generation_config, "eos_token_id", None)
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    def decode(
        self, slab: DenseSlab, token_ids: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows vocab"]:
        """Process new tokens of each row, right-aligned; logits of the last column."""
        columns = max(map(len, token_ids))
        slab.begin([len(ids) for ids in token_ids], columns)
        padded = [[_PAD] * (columns - len(ids)) + list(ids) for ids in token_ids]
        seen = slab.seen_positions
        masks = self._masks.make(
            seen,
            columns,
            implementation=check_implementation(self._config._attn_implementation),
            dtype=self.shape.dtype,
        )
        logits = self._forward(slab, padded, seen[:, -columns:].clamp(min=0), masks, 1)
        slab.end()
        return logits[:, -1]

    def prefill(
        self,
        slab: DenseSlab | SlabRows,
        token_ids: Sequence[Sequence[int]],
        columns: int,
        wanted: list[int],
    ) -> Float[Tensor, "rows wanted vocab"]:
        """Process the next columns of prompts, which are left-aligned and followed by pads.

        The causal mask hides the pads, so no other mask is needed. A row's result equals that of
        the row alone.
        """
        done = slab.window.width
        slab.begin([len(ids) for ids in token_ids], columns, at_start=True)
        padded = [list(ids) + [_PAD] * (columns - len(ids)) for ids in token_ids]
        positions = torch.arange(done, done + columns, device=self.shape.device)
        kept = torch.tensor(wanted, dtype=torch.int64, device=self.shape.device)
        logits = self._forward(slab, padded, positions.expand(slab.rows, -1), None, kept)
        slab.end()
        return logits

    def _forward(
        self,
        slab: DenseSlab | SlabRows,
        token_ids: list[list[int]],
        positions: Tensor,
        masks: object,
        keep: int | Tensor,
    ) -> Float[Tensor, "rows kept vocab"]:
        head = {"logits_to_keep": keep} if self._keeps_some else {}
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor(token_ids, device=self.shape.device),
                position_ids=positions.long(),
                attention_mask=masks,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: SlabCache(slab, self._indexes)},
                **head,
            )
        logits: Tensor = output.logits
        if self._keeps_some or isinstance(keep, int):
            return logits
        return logits[:, keep]

    @torch.no_grad()
    def _measure(self) -> tuple[KVShape, list[int | None]]:
        """Measure the KV shape by a forward of one token with Transformers' own cache.

        Returns:
            The shape, and for each layer of the model the layer in it of its index keys.
        """
        device = self._model.device
        cache = DynamicCache(config=self._config if INDEXED in self._masks.kinds else None)
        token = torch.full((1, 1), _PAD, device=device)
        own = {self._cache_argument: cache}
        self._model(input_ids=token, use_cache=True, return_dict=True, **own)
        layers, of_indexes, indexes = [], list[LayerShape](), list[int | None]()
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.ndim != 4:
                raise UnsupportedModel(
                    f"expected a model that caches keys and values of every layer, got "
                    f"{type(self._model).__name__}; use quire.LLM"
                )
            layers.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
            dtype, index = keys.dtype, getattr(layer, "indexer_keys", None)
            indexes.append(None if index is None else len(cache.layers) + len(of_indexes))
            if index is not None:
                of_indexes.append(LayerShape(1, index.shape[2], 0))
        return KVShape((*layers, *of_indexes), dtype, device), indexes


def _refuse(model: PreTrainedModel, parameters: tuple[str, ...], config: object) -> str:
    """Refuse a model whose rows cannot share a forward; return the forward's cache argument."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} has an encoder: expected a decoder-only language model")
    argument = cache_argument(parameters)
    if "position_ids" not in parameters or argument is None:
        raise UnsupportedModel(
            f"{name} does not accept position_ids and a cache, which rows at different positions "
            "need; use quire.LLM"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModel(
            f"{name} computes ALiBi from a mask of tokens, and rows of different lengths need one "
            "of queries and tokens; use quire.LLM"
        )
    if any(map(reads_cache_length, model.modules())):
        raise UnsupportedModel(
            f"{name} computes positions from the length of the cache, which rows of different "
            "lengths share; use quire.LLM"
        )
    for rope_type in _rope_types(config):
        refuse_dynamic(rope_type)
        if rope_type == "longrope":
            raise UnsupportedModel(
                f"{name} has {rope_type} rotary frequencies, which Transformers selects by the "
                "longest row of a batch: a long query would change the others; use quire.LLM"
            )
    return argument


def _rope_types(config: object) -> set[str]:
    found = getattr(config, "rope_parameters", None) or {}
    groups = [found, *(nested for nested in found.values() if isinstance(nested, dict))]
    return {str(group["rope_type"]) for group in groups if "rope_type" in group}
