"""ModelSpec: the shape of a decoder, read from its config.json, and the bytes derived from it.

No weights are read and torch is not imported: planning and admission use the same arithmetic.

Layers of a model from its config: sliding windows, experts, and vector parameters.

A config has five keys for windows, read in this order: `use_sliding_window: false`; the list
`layer_types`; GPT-Neo's `attention_types`; the period `sliding_window_pattern`, whose last layer
has full attention; and `max_window_layers`, below which all layers have full attention. Otherwise
`sliding_window` applies to all layers.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, ModelError, UnsupportedModel
from quire.layout.config import (
    ATTENTION_AND_STATE,
    ATTENTION_FREE,
    DENSE_BESIDE_EXPERTS,
    LAST_LAYER_FULL,
    LEARNED_POSITIONS,
    MAX_LAYERS,
    PARTIAL_ROPE,
    QUERY_EXPERTS,
    REFUSED,
    SHARED_BLOCKS,
    SINUSOIDAL_POSITIONS,
    TIED_BY_DEFAULT,
    TWICE_THE_KV_HEADS,
    TWICE_THE_VALUE_DIM,
    TWO_ATTENTIONS,
    UNGATED,
    WINDOW_IGNORED,
    WINDOW_WITHOUT_QUERY,
    ConfigReader,
    shown,
)

if TYPE_CHECKING:  # planning starts without NumPy
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

# Layers with full attention, with a sliding window, and with chunked attention.

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # full attention to the tokens that an index selects
RECURRENT, HYBRID, NO_CACHE = "linear_attention", "hybrid", "mlp"
_KINDS = {
    FULL: FULL,
    INDEXED: FULL,
    "global": FULL,
    "attention": FULL,
    SLIDING: SLIDING,
    "local": SLIDING,
    CHUNKED: CHUNKED,
    RECURRENT: RECURRENT,
    "conv": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    HYBRID: HYBRID,
    "hybrid_sliding": SLIDING,
    NO_CACHE: NO_CACHE,
    "moe": NO_CACHE,
}
_LETTERS = {"M": RECURRENT, "*": FULL, "-": NO_CACHE, "E": "moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """Sparse attention (DSA): a query attends to the tokens whose index keys score highest.

    A layer without an index of its own uses the selection of the last layer that has one.
    Source: DeepSeek-V3.2-Exp, section 2.1; sharing between layers: arXiv 2603.12201.

    Attributes:
        topk: tokens that a query attends to.
        heads: index queries of a token; 0: the layer has no index.
        dim: elements of an index query, and of the index key that is stored; 0: it has no index.
    """

    topk: int
    heads: int = 0
    dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (MLA): a layer stores one latent per token for all heads.

    A latent is projected to a key and a value of each head. The rotated part of the keys is stored
    beside it, once for all heads.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Attributes:
        key_dim: elements of a head's key that are projected from the latent (qk_nope_head_dim).
        value_dim: elements of a head's value, all projected from the latent (v_head_dim).
        query_rank: width of the compressed queries (q_lora_rank); None: one projection.
        index: selects the tokens that are attended to; None: all are.
        is_value: whether the latent is itself the value of a KV head, whose key is the value times
            a weight (Gemma 4's `attention_k_eq_v`): nothing is projected.
    """

    key_dim: int
    value_dim: int
    query_rank: int | None = None
    index: IndexSpec | None = None
    is_value: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of a layer's attention, as they are stored.

    Attributes:
        query_heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `query_heads`.
        key_dim: elements of a stored key; with a latent, of the rotated part of all keys.
        value_dim: elements of a stored value; with a latent, its elements.
        latent: set if values are latents, so that a key is its value and the rotated part.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads={self.query_heads} is not a multiple of num_kv_heads={self.kv_heads}:"
                " every KV head must serve the same number of query heads"
            )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def query_dim(self) -> int:
        """Elements of a query that is compared with stored keys."""
        return self.key_dim if self.latent is None else self.value_dim + self.key_dim

    @property
    def projected_dims(self) -> tuple[int, int]:
        """Elements of a query of the model, and of the output of a query head."""
        if self.latent is None:
            return self.key_dim, self.value_dim
        return self.latent.key_dim + self.key_dim, self.latent.value_dim

    @property
    def index(self) -> IndexSpec | None:
        """Selects the tokens that are attended to; None: all are."""
        return None if self.latent is None else self.latent.index

    @property
    def index_dim(self) -> int:
        """Elements of a stored index key; 0: the layer stores none."""
        return 0 if self.index is None else self.index.dim

    @property
    def values_per_token(self) -> int:
        """Elements that a layer stores per token: a key and a value per KV head, and its index."""
        return self.kv_heads * (self.key_dim + self.value_dim) + self.index_dim

    @property
    def values_per_pair(self) -> int:
        """Multiplications of a token that attends to one other: with its key and its value.

        With a latent, the query is folded: it is compared with latents.
        """
        return self.query_heads * (self.query_dim + self.value_dim)

    @property
    def values_per_expanded_pair(self) -> int:
        """Multiplications of a token that attends to one other with keys and values of heads."""
        return self.query_heads * sum(self.projected_dims)

    @property
    def values_per_expansion(self) -> int:
        """Multiplications that expand a latent to the keys and values of all heads; else 0."""
        if self.latent is None or self.latent.is_value:
            return 0
        return self.query_heads * (self.latent.key_dim + self.latent.value_dim) * self.value_dim

    def products_in_step(self, pairs: "Counts", new: "Counts", before: "Counts") -> "Counts":
        """Return the multiplications of attention, of each sequence.

        A sequence with latents and several new tokens attends in the cheaper form: to latents, or
        to keys and values expanded from the latents of earlier tokens too. The projection of new
        tokens' queries or latents costs the same in both, and is one of the model's projections.

        Args:
            pairs: of a new token and a token that it attends to.
            new: new tokens.
            before: earlier tokens.
        """
        products = pairs * self.values_per_pair
        if self.latent is None or self.latent.is_value:
            return products
        expanded = pairs * self.values_per_expanded_pair + before * self.values_per_expansion
        saved: Counts = products - expanded
        products -= saved * ((saved > 0) & (new > 1))
        return products

    @property
    def activations_per_token(self) -> int:
        """Elements of queries, keys, values and outputs of a token in attention.

        With a latent also folded queries and outputs over latents, or expanded keys and values.
        """
        if self.latent is None:
            return (self.query_heads + self.kv_heads) * (self.key_dim + self.value_dim)
        forms = max(self.values_per_pair, self.values_per_expanded_pair)
        return self.values_per_token + self.values_per_expanded_pair + forms

    def of_rank(self, size: int) -> "HeadShape":
        """Return the heads of one of `size` ranks of a tensor-parallel group.

        Each rank stores the latents of all heads, but values of its own KV heads.
        """
        shared = self.latent is not None and not self.latent.is_value
        kv_heads = self.kv_heads if shared else self.kv_heads // size
        return replace(self, query_heads=self.query_heads // size, kv_heads=kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The recurrent state of a layer: a fixed number of elements for each sequence.

    Attributes:
        conv: channels of a causal convolution, and its newest inputs that are stored; None: none.
        recurrent: shape of the state of a scan; empty: none.
        parameters: number of parameters of the layer's mixer.
    """

    conv: tuple[int, int] | None = None
    recurrent: tuple[int, ...] = ()
    parameters: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor of a sequence, by its name."""
        found = {CONV: self.conv, RECURRENT_STATE: self.recurrent}
        return {name: shape for name, shape in found.items() if shape}


CONV, RECURRENT_STATE = "conv", "recurrent"
"""Names of the tensors of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's attention and state.

    Attributes:
        window: sliding window W in tokens: a query at position p attends to positions > p - W.
            None: full or chunked attention.
        chunk: chunk C in tokens: a query at position p attends to positions >= p // C * C. None:
            full attention or a sliding window.
        source: the layer whose keys and values this layer reads; it stores none itself. None: it
            stores its own.
        heads: its heads if they differ from the other layers; None: those of the model.
        keys_from_values: keys and values have one projection, and the key is computed from the
            value.
        attends: whether it has attention; otherwise it has a state or only an MLP.
        state: its recurrent state; None: it has none.
        drafts: whether it belongs to a draft model, whose keys and values are unquantized.
    """

    window: int | None = None
    chunk: int | None = None
    source: int | None = None
    heads: HeadShape | None = None
    keys_from_values: bool = False
    attends: bool = True
    state: StateSpec | None = None
    drafts: bool = False

    @property
    def stores(self) -> bool:
        """Whether it stores keys and values of its own."""
        return self.attends and self.source is None

    @property
    def stores_all(self) -> bool:
        """Whether it stores the keys and values of all tokens: only such layers can evict."""
        return self.stores and self.window is None and self.chunk is None

    def seen_tokens(self, tokens: int) -> int:
        """Return how many of a sequence's `tokens` tokens its last one attends to."""
        if self.chunk is not None:
            return min(tokens, (tokens - 1) % self.chunk + 1)
        return tokens if self.window is None else min(tokens, self.window)

    def seen_in_step(self, new: "Counts", before: "Counts") -> "Counts":
        """Return how many tokens `new` tokens after `before` others attend to, all together."""
        if self.chunk is not None:
            return before % self.chunk + new
        seen = before + new
        if self.window is None:
            return seen
        hidden = seen - (self.window + new - 1)
        return seen - hidden * (hidden > 0)

    def pairs_in_step(self, new: "Counts", before: "Counts") -> "Counts":
        """Return the pairs of a new token and a token that it attends to."""
        return self._pairs(before + new) - self._pairs(before)

    def _pairs(self, tokens: "Counts") -> "Counts":
        """Pairs of the first `tokens` tokens: the sum of `seen_tokens`."""
        if self.chunk is not None:
            whole, rest = tokens // self.chunk, tokens % self.chunk
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) // 2
        pairs: Counts = tokens * (tokens + 1) // 2
        if self.window is not None:
            hidden = tokens - self.window
            hidden = hidden * (hidden > 0)
            pairs -= hidden * (hidden + 1) // 2
        return pairs


def read_layers(reader: ConfigReader, num_layers: int, heads: HeadShape) -> tuple[LayerSpec, ...]:
    """Return the attention of each layer.

    Args:
        reader: the config.
        num_layers: number of layers.
        heads: heads of layers that the config does not name.

    Raises:
        ModelError: the list of layers has another length, the size of a window or chunk is missing,
            or all layers of a type read the keys and values of other layers.
        UnsupportedModel: a layer has another kind of attention.
    """
    kinds = _layer_kinds(reader, num_layers)
    if reader.model_type in LAST_LAYER_FULL:
        kinds[-1] = FULL
    one_projection = reader.flag("attention_k_eq_v", default=False)
    sizes = {FULL: None, SLIDING: _window(reader), CHUNKED: _chunk(reader)}
    state = _state(reader)
    if not {RECURRENT, HYBRID}.isdisjoint(kinds) and state is None:
        raise UnsupportedModel(
            f"{reader.model_type} models are not supported: Quire does not know the shape of their "
            "recurrent states"
        )
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in kinds and sizes[kind] is None:
            raise reader.missing(name)
    in_all = reader.find("cca_time0") is not None
    first_reader = num_layers - (reader.optional_integer("num_kv_shared_layers") or 0)
    sources = {kind: layer for layer, kind in enumerate(kinds[: max(first_reader, 0)])}
    shapes = [_layer_heads(reader, layer, kind, heads) for layer, kind in enumerate(kinds)]
    if reader.find("index_topk") is not None:
        shapes = _indexed(reader, kinds, shapes)
    for layer in range(max(first_reader, 0), num_layers):
        source = sources.get(kinds[layer])
        if source is None or shapes[source] != shapes[layer]:
            raise ModelError(
                f"config.json: num_kv_shared_layers={num_layers - first_reader}, but layer {layer} "
                f"({kinds[layer]}) has no earlier layer of its type and with its heads whose keys "
                "and values it can read"
            )
    return tuple(
        LayerSpec(
            window=sizes[SLIDING] if kind == SLIDING else None,
            chunk=sizes[CHUNKED] if kind == CHUNKED else None,
            source=sources[kind] if layer >= first_reader else None,
            heads=None if shape == heads else shape,
            keys_from_values=one_projection and kind == FULL,
            attends=kind not in (RECURRENT, NO_CACHE),
            state=state if in_all or kind in (RECURRENT, HYBRID) else None,
        )
        for layer, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    )


_OF_A_LATENT_LAYER = (
    *("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    *("qk_nope_head_dim", "v_head_dim"),
)


def _state(reader: ConfigReader) -> StateSpec | None:
    """The state of a recurrent layer, from the keys of its family."""
    hidden = reader.integer("hidden_size", "n_embd", "n_embed", "d_model")
    if reader.positive_integer("linear_num_value_heads"):  # gated delta rule
        key_heads, heads, key_dim, value_dim, kernel = (
            reader.integer(f"linear_{name}")
            for name in (
                *("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"),
                "conv_kernel_dim",
            )
        )
        if heads % key_heads:
            raise ConfigError(
                f"linear_num_value_heads={heads} is not a multiple of linear_num_key_heads="
                f"{key_heads}: check config.json"
            )
        keys, values = key_heads * key_dim, heads * value_dim
        projections = hidden * (2 * keys + 3 * values + 2 * heads)
        return StateSpec(
            conv=(2 * keys + values, kernel),
            recurrent=(heads, key_dim, value_dim),
            parameters=projections + (2 * keys + values) * kernel + 2 * heads + value_dim,
        )
    times = reader.positive_integer("cca_time0"), reader.positive_integer("cca_time1")
    if times[0] is not None and times[1] is not None:  # Zaya: convolutions of queries and keys
        values = reader.integer("num_key_value_heads") * reader.integer("head_dim")
        channels = reader.integer("num_attention_heads") * reader.integer("head_dim") + values
        return StateSpec(
            conv=(channels, times[0] + times[1] - 2),
            recurrent=(values // 2,),  # the later half of the last token's values
            parameters=channels * (times[0] + 2 + times[1] * reader.integer("head_dim"))
            + reader.integer("num_key_value_heads"),
        )
    in_groups = reader.find("layer_group_size") is not None  # Bailing: heads of both kinds agree
    of_groups = ("num_attention_heads",) if in_groups else ()
    found = reader.positive_integer("linear_num_heads", "linear_attn_config.num_heads", *of_groups)
    if found is not None:  # Kimi delta attention
        heads = found
        dim = reader.integer("linear_head_dim", "linear_attn_config.head_dim", "head_dim")
        width = heads * dim
        kernel = reader.integer(
            "linear_conv_kernel_dim",
            *("linear_attn_config.short_conv_kernel_size", "short_conv_kernel_size"),
        )
        gates = 2 * hidden * width if in_groups else 2 * dim * (hidden + width)  # else of low rank
        projections = hidden * (4 * width + heads) + gates
        return StateSpec(
            conv=(3 * width, kernel),
            recurrent=(heads, dim, dim),
            parameters=projections + 3 * width * kernel + heads + width + dim,
        )
    if reader.find("linear_attn_alpha_factor") is not None:  # MiniMax's lightning attention
        heads = reader.integer("num_attention_heads")
        dim = reader.positive_integer("head_dim") or hidden // heads
        parameters = heads * dim * (5 * hidden + 1)
        return StateSpec(recurrent=(heads, dim, dim), parameters=parameters)
    kernel = reader.positive_integer("conv_L_cache") or 0
    if kernel:  # gated short convolution
        return StateSpec(conv=(hidden, kernel), parameters=hidden * (4 * hidden + kernel))
    return _mamba_state(reader, hidden)


def _mamba_state(reader: ConfigReader, hidden: int) -> StateSpec | None:
    """The state of a Mamba layer: a selective scan of channels, or (Mamba 2) of heads."""
    state = reader.positive_integer("mamba_d_state", "ssm_state_size", "state_size")
    if state is None:
        return None
    own = ("num_heads",) if reader.model_type == "mamba2" else ()  # elsewhere of attention
    heads = reader.positive_integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", *own)
    kernel = reader.integer("mamba_d_conv", "conv_kernel")
    widths = ("intermediate_size",) if reader.model_type in ATTENTION_FREE else ("mamba_d_ssm",)
    inner = reader.positive_integer(*widths)
    inner = inner or hidden * (reader.positive_integer("mamba_expand", "expand") or 2)
    if heads is None or reader.find("mamba_dt_rank") is not None:
        of_rank = reader.find("mamba_dt_rank", "time_step_rank")
        rank = of_rank if isinstance(of_rank, int) else -(-hidden // 16)
        norms = rank + 2 * state if reader.model_type == "jamba" else 0
        return StateSpec(
            conv=(inner, kernel),
            recurrent=(inner, state) if heads is None else (heads, inner // heads, state),
            parameters=inner * (3 * hidden + kernel + 3 + 2 * rank + 3 * state) + norms,
        )
    groups = reader.positive_integer("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    dims = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    automatic = reader.find(*dims) in (None, "auto")  # Mamba 2 alone has `head_dim`
    dim = inner // heads if automatic else reader.integer(*dims)
    width = heads * dim
    if own and width != inner:
        raise ConfigError(
            f"num_heads={heads} of head_dim={dim} are {width} channels, expected expand * "
            f"hidden_size = {inner}: check config.json"
        )
    channels = width + 2 * groups * state
    has_norm = reader.flag("mamba_rms_norm", default=reader.model_type != "falcon_h1")
    return StateSpec(
        conv=(channels, kernel),
        recurrent=(heads, dim, state),
        parameters=hidden * (2 * width + channels + heads)
        + channels * (kernel + 1)
        + 3 * heads
        + width * has_norm,
    )


_OF_A_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")


def _layer_heads(reader: ConfigReader, layer: int, kind: str, heads: HeadShape) -> HeadShape:
    """The heads of a layer: overrides of `per_layer_config`, or of its kind of attention."""
    if heads.latent is not None:
        overrides = _overrides(reader, layer, kind)
        if not overrides:
            return heads
        config = {key: overrides.get(key, reader.find(key)) for key in _OF_A_LATENT_LAYER}
        of = ConfigReader({**config, "model_type": f"{reader.model_type}, layer {layer}"})
        return _model_heads(of, 0, of.integer("num_attention_heads"))
    query_heads_of = dict(enumerate(reader.sequence("num_attention_heads_per_layer") or ()))
    overrides = {
        "num_attention_heads": query_heads_of.get(layer),
        **_overrides(reader, layer, kind),
    }
    # a name that has no defaults: those of the family are in `heads`
    own = ConfigReader({**overrides, "model_type": f"{reader.model_type}, layer {layer}"})
    for key in overrides:
        if key not in _OF_A_LAYER:
            raise UnsupportedModel(
                f"layer {layer} has its own {key!r} (per_layer_config in config.json): layers can "
                f"differ in {', '.join(_OF_A_LAYER)}"
            )
    query_heads, kv_heads, key_dim, value_dim = map(own.positive_integer, _OF_A_LAYER)
    query_heads, key_dim = query_heads or heads.query_heads, key_dim or heads.key_dim
    twice = reader.model_type in TWICE_THE_KV_HEADS and kind == SLIDING
    kv_heads = kv_heads or heads.kv_heads * (2 if twice else 1)
    if query_heads % kv_heads:
        raise ModelError(
            f"config.json: layer {layer} has num_attention_heads={query_heads}, not a multiple of "
            f"its num_key_value_heads={kv_heads}"
        )
    same_dims = heads.key_dim == heads.value_dim
    shape = HeadShape(
        query_heads=query_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim or (key_dim if same_dims else heads.value_dim),
    )
    if kind == FULL and reader.flag("attention_k_eq_v", default=False):
        return _keys_in_values(reader, shape)
    return shape


def _keys_in_values(reader: ConfigReader, heads: HeadShape) -> HeadShape:
    """Heads whose keys are their values times a weight, apart from the elements that RoPE rotates.

    Only these are stored beside the values.
    """
    name, key, factor = "rope_parameters.full_attention", "partial_rotary_factor", None
    rope = reader.find(name)
    if isinstance(rope, Mapping) and rope.get("rope_type") == PARTIAL_ROPE and key in rope:
        factor = reader.fraction(f"{name}.{key}")
    rotated = 2 * int((1.0 if factor is None else factor) * heads.key_dim // 2)
    if heads.key_dim != heads.value_dim or not 0 < rotated < heads.key_dim:
        return heads
    latent = LatentSpec(key_dim=heads.key_dim - rotated, value_dim=heads.value_dim, is_value=True)
    return replace(heads, key_dim=rotated, latent=latent)


def _indexed(
    reader: ConfigReader, kinds: Sequence[str], shapes: Sequence[HeadShape]
) -> list[HeadShape]:
    """The heads of each layer with its index, or with the use of the index of an earlier layer."""
    topk, named = reader.integer("index_topk"), _kinds(reader)
    index = IndexSpec(
        topk=topk, heads=reader.integer("index_n_heads"), dim=reader.integer("index_head_dim")
    )
    modes = reader.sequence("indexer_types") or reader.find("index_topk_pattern")  # "FSSS..."
    every = reader.positive_integer("index_topk_freq") or 1
    first = reader.optional_integer("index_skip_topk_offset")
    first = 2 if first is None else first
    if not isinstance(modes, list | str):
        modes = ["SF"[max(layer - first + 1, 0) % every == 0] for layer in range(len(kinds))]
    if len(modes) != len(kinds):
        raise ModelError(
            f"config.json lists the indexers of {len(modes)} layers, but the model has "
            f"{len(kinds)}: make 'indexer_types' and 'num_hidden_layers' agree"
        )
    found = []
    for layer, (kind, heads) in enumerate(zip(kinds, shapes, strict=True)):
        if kind == FULL and (named is None or named[layer] == INDEXED) and heads.latent is not None:
            own = index if str(modes[layer])[:1] in "Ff" else IndexSpec(topk=topk)
            heads = replace(heads, latent=replace(heads.latent, index=own))
        found.append(heads)
    return found


def _overrides(reader: ConfigReader, layer: int, kind: str) -> Mapping[str, object]:
    by_layer = reader.find("per_layer_config")
    if by_layer is not None:
        try:  # keys are written with leading zeros
            own = {int(key): each for key, each in dict(by_layer).items()}.get(layer, {})  # type: ignore[call-overload]
            return dict(own)
        except (TypeError, ValueError):
            raise ModelError(
                f"config.json: 'per_layer_config' is {shown(by_layer)}, expected an object of "
                "layer numbers and objects"
            ) from None
    if kind != FULL or reader.find("global_head_dim") is None:
        return {}
    own = {"head_dim": reader.find("global_head_dim")}
    if reader.flag("attention_k_eq_v", default=False):
        own["num_key_value_heads"] = reader.find("num_global_key_value_heads")
    return own


def _layer_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    if not reader.flag("use_sliding_window", default=True):
        return [FULL] * num_layers
    kinds = _kinds(reader)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelError(
                f"config.json lists the attention types of {len(kinds)} layers, but the model has"
                f" {num_layers}: make 'layer_types' and 'num_hidden_layers' agree"
            )
        return [_kind(kind) for kind in kinds]
    if _chunk(reader) is not None:
        return _chunked_kinds(reader, num_layers)
    if _window(reader) is None:
        return [FULL] * num_layers
    period = reader.optional_integer("sliding_window_pattern", "_sliding_window_pattern")
    first = reader.optional_integer("max_window_layers") or 0
    slides = (
        layer >= first and (not period or (layer + 1) % period != 0) for layer in range(num_layers)
    )
    return [SLIDING if one else FULL for one in slides]


def _chunked_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    """Llama 4: layers without RoPE have full attention, the others chunked attention."""
    with_rope: Sequence[object] | None = reader.sequence("no_rope_layers")
    if not with_rope:
        period = reader.positive_integer("no_rope_layer_interval") or 4
        with_rope = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(with_rope) != num_layers:
        raise ModelError(
            f"config.json: 'no_rope_layers' has {len(with_rope)} entries, but the model has"
            f" {num_layers} layers"
        )
    return [CHUNKED if one else FULL for one in with_rope]


def _chunk(reader: ConfigReader) -> int | None:
    if reader.is_null("attention_chunk_size"):
        return None
    return reader.optional_integer("attention_chunk_size") or None


def _window(reader: ConfigReader) -> int | None:
    if reader.model_type in WINDOW_IGNORED:
        return None
    if reader.model_type in WINDOW_WITHOUT_QUERY:
        size = reader.optional_integer("sliding_window_size")
        if size is not None:
            return size + 1
    # null: no window; absent key: the family's default; 0: null in old files
    if reader.is_null("sliding_window"):
        return None
    return reader.optional_integer("sliding_window", "window_size") or None


def _kinds(reader: ConfigReader) -> list[object] | None:
    for families, kind in ((ATTENTION_AND_STATE, HYBRID), (ATTENTION_FREE, RECURRENT)):
        if reader.model_type in families:
            return [kind] * (reader.num_layers() or 0)
    kinds = reader.sequence("layer_types", "attention_layers", "layers_block_type")
    if kinds is not None:
        return kinds
    letters = reader.find("hybrid_override_pattern")
    if isinstance(letters, str):  # Nemotron-H
        return [_LETTERS.get(letter, letter) for letter in letters]
    attending = _attending(reader)
    if attending is not None:
        return [
            FULL if attending(layer) else RECURRENT for layer in range(reader.num_layers() or 0)
        ]
    pairs = reader.sequence("attention_types")
    if pairs is None:
        return None
    # GPT-Neo: [[["global", "local"], 12]] repeats the inner list twelve times
    return [kind for pair in pairs for kind in _repeated(pair)]


def _attending(reader: ConfigReader) -> Callable[[int], bool] | None:
    """Whether a layer of a hybrid has attention, from its number; None: the config has no rule."""
    listed = reader.sequence("attn_layer_indices", "full_attn_idxs")
    if listed is not None:  # Bamba, LFM2
        return lambda layer: layer in listed
    from_one = reader.sequence("linear_attn_config.full_attn_layers")
    if from_one is not None:  # Kimi Linear
        return lambda layer: layer + 1 in from_one
    last = reader.positive_integer("full_attention_interval", "layer_group_size")
    if last is not None:  # Qwen3-Next, Bailing
        return lambda layer: (layer + 1) % last == 0
    period = reader.positive_integer("attn_layer_period")
    if period is None:
        return None
    offset = reader.optional_integer("attn_layer_offset") or 0  # Jamba
    return lambda layer: layer % period == offset


def _layers_alone(reader: ConfigReader) -> list[object] | None:
    """Kinds of layers of which each is attention, a state or an MLP; None: all have an MLP."""
    kinds = _kinds(reader) or []
    alone = NO_CACHE in kinds or "moe" in kinds or reader.model_type in ATTENTION_FREE
    return kinds if alone else None


def _repeated(pair: object) -> Iterator[object]:
    match pair:
        case [cycle, int(times)] if 0 <= times <= MAX_LAYERS:
            for _ in range(times):
                yield from _listed(cycle)
        case _:
            raise ModelError(
                f"config.json: 'attention_types' holds {shown(pair)}, expected pairs of a list of "
                "layer types and its number of repetitions"
            )


def _listed(cycle: object) -> Iterable[object]:
    return cycle if isinstance(cycle, list) else [cycle]


def _kind(kind: object) -> str:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(
            f"a layer of type {kind!r}: Quire supports only layers of type {', '.join(_KINDS)}"
        )
    return _KINDS[kind]


# ---- mixture -------------------------------------------------------------------------------------

# Mixture-of-experts layers: number of weights, and number of weights that one token uses.


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """The expert layers of a model; all have the same shape.

    Attributes:
        num_layers: number of layers with experts; the others have a dense MLP.
        num_experts: routed experts per layer.
        experts_per_token: routed experts per token.
        expert_size: intermediate size of one expert.
        shared_size: intermediate size of the shared experts; 0 for none.
        zero_experts: further routed experts per layer, which return their input. Transformers
            allocates their first projections, which are not used.
        router_width: width of the router's MLP (Zaya), which also adds its input in the layer
            before, scaled, and may select no expert; 0: the router is one projection.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0
    zero_experts: int = 0
    router_width: int = 0


def read_mixture(reader: ConfigReader, num_layers: int) -> MixtureSpec | None:
    """Return the experts of a model, or None for a dense model.

    Raises:
        ModelError: the config has experts but not the number of experts per token.
    """
    num_experts = reader.optional_integer(
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    )
    if num_experts is None or num_experts <= 1 or not reader.flag("enable_moe_block", default=True):
        return None
    expert_layers = _expert_layers(reader, num_layers)
    if not expert_layers:
        return None
    own_size = reader.positive_integer(
        "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size"
    )
    expert_size = own_size or reader.integer("intermediate_size")
    return MixtureSpec(
        num_layers=len(expert_layers),
        num_experts=num_experts,
        experts_per_token=reader.integer(
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_k",
            "moe_topk",
            "ffn_config.moe_top_k",
            "top_k_experts",
        ),
        expert_size=expert_size,
        shared_size=_shared_size(reader, expert_size),
        zero_experts=reader.optional_integer("zero_expert_num") or 0,
        router_width=reader.optional_integer("router_hidden_size") or 0,
    )


def _shared_size(reader: ConfigReader, expert_size: int) -> int:
    width = reader.optional_integer(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    if width is not None:
        return width
    shared = reader.optional_integer(
        "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"
    )
    return (shared or 0) * expert_size


def _expert_layers(reader: ConfigReader, num_layers: int) -> Collection[int]:
    """Layers with experts, if the model has experts."""
    alone = _layers_alone(reader)
    if alone is not None:
        return [layer for layer, kind in enumerate(alone) if kind == "moe"]
    kinds = reader.sequence("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelError(
                f"config.json: 'mlp_layer_types' has {len(kinds)} entries, but the model has"
                f" {num_layers} layers"
            )
        return [layer for layer, kind in enumerate(kinds) if kind != "dense"]
    listed = reader.integers("moe_layers")
    if listed:
        return {layer for layer in listed if 0 <= layer < num_layers}
    period = reader.positive_integer("expert_layer_period")
    if period is not None:  # Jamba
        offset = reader.optional_integer("expert_layer_offset") or 0
        return [layer for layer in range(num_layers) if layer % period == offset]
    first = reader.optional_integer(
        "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"
    )
    first = first or 0
    step = reader.positive_integer("decoder_sparse_step", "interleave_moe_layer_step") or 1
    dense_layers = reader.integers("mlp_only_layers")
    return [
        layer
        for layer in range(num_layers)
        if layer >= first and layer not in dense_layers and (layer + 1) % step == 0
    ]


_WIDTHS = (
    *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    *("dff", "ffn_config.ffn_hidden_size"),
)


def _dense_sizes(
    reader: ConfigReader, layers: Sequence[LayerSpec], hidden_size: int
) -> tuple[int, ...]:
    """The width of each layer's dense MLP, whether the layer has one or only experts."""
    sizes = reader.sizes(len(layers), "intermediate_size_mlp") or reader.sizes(
        len(layers), *_WIDTHS
    )
    if sizes is None and reader.model_type not in UNGATED:
        raise reader.missing(*_WIDTHS)
    if sizes is not None and reader.flag("block_auto_adjust_ff_dim", default=False):  # LFM2
        factor, step = reader.find("block_ffn_dim_multiplier"), reader.integer("block_multiple_of")
        scale = factor if isinstance(factor, float | int) else 1.0
        sizes = [-(-int(scale * (2 * size // 3)) // step) * step for size in sizes]
    sizes = sizes or [
        hidden_size * (reader.positive_integer("intermediate_multiple_size") or 4)
    ] * len(layers)
    if reader.flag("use_double_wide_mlp", default=False):
        of_layers = zip(sizes, layers, strict=True)
        sizes = [size * (1 if layer.source is None else 2) for size, layer in of_layers]
    return tuple(sizes)


# ---- further weights -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSpec:
    """Weights beside attention and MLP: per-layer embeddings, and LAuReL and AltUp of Gemma 3n.

    Attributes:
        layer_vocab: rows of the lookup table of per-layer embeddings.
        layer_width: elements of a token's embedding for one layer; 0: no such embeddings.
        laurel_rank: rank of the second residual path of a layer; 0: none.
        streams: copies of the residual stream (AltUp); 0: it is one.
        in_block: parameters of a layer with attention and state that its block adds (Zamba): a
            projection, adapters, norms, and projections of the embeddings beside the hidden state.
        counted_twice: parameters of blocks that have the weights of an earlier block; negative if
            blocks have unused adapters.
        scales: vectors of the hidden size in a layer, beside norms (Zaya).
    """

    layer_vocab: int = 0
    layer_width: int = 0
    laurel_rank: int = 0
    streams: int = 0
    in_block: int = 0
    counted_twice: int = 0
    scales: int = 0

    def layer_parameters(self, hidden_size: int) -> int:
        """Return the parameters of one layer: projections, and AltUp's router and coefficients."""
        per_element = 2 * (self.layer_width + self.laurel_rank) + self.streams + self.scales
        return hidden_size * per_element + self.streams**2 + self.streams**3

    def model_parameters(self, hidden_size: int, num_layers: int) -> int:
        """Return the parameters outside of layers, without the lookup table."""
        per_layer = self.layer_width * (hidden_size * num_layers + 1) if self.layer_width else 0
        of_input = 2 * hidden_size if self.scales else 0
        return per_layer + 2 * max(self.streams - 1, 0) * hidden_size**2 + of_input


def read_extra(reader: ConfigReader, heads: HeadShape, attending: int, *, tied: bool) -> ExtraSpec:
    """Return the weights beside attention and MLP.

    Args:
        reader: the config.
        heads: of the model.
        attending: number of layers with attention.
        tied: whether weights that are equal in all checkpoints are stored once.
    """
    in_block, counted_twice = 0, 0
    if reader.model_type in SHARED_BLOCKS:
        hidden, width = reader.integer("hidden_size"), reader.integer("intermediate_size")
        rank = reader.optional_integer("adapter_rank") or 0
        of_attention = reader.flag("use_shared_attention_adapter", default=False)
        adapters = rank * (hidden + 2 * width + 12 * hidden * of_attention)
        inputs = hidden * heads.key_dim * (heads.query_heads + 2 * heads.kv_heads)
        outputs = hidden * heads.key_dim * heads.query_heads
        shared = 2 * inputs + outputs + 3 * hidden * width + 3 * hidden
        num_blocks = reader.optional_integer("num_mem_blocks") or 1
        in_block = hidden**2 + adapters + inputs + 3 * hidden
        by_block = [len(range(block, attending, num_blocks)) for block in range(num_blocks)]
        if tied:
            counted_twice = shared * max(attending - num_blocks, 0)
        else:  # each layer has the adapters of all layers of its block
            counted_twice = adapters * (attending - sum(count**2 for count in by_block))
    return ExtraSpec(
        in_block=in_block,
        counted_twice=counted_twice,
        scales=8 if reader.find("router_hidden_size") is not None else 0,
        layer_vocab=reader.optional_integer("vocab_size_per_layer_input") or 0,
        layer_width=reader.optional_integer("hidden_size_per_layer_input") or 0,
        laurel_rank=reader.optional_integer("laurel_rank") or 0,
        streams=reader.optional_integer("altup_num_inputs") or 0,
    )


# ---- vectors -------------------------------------------------------------------------------------

# Vector parameters of a layer: biases, norm weights and attention sinks.
#
# They are about 0.1 % of the parameters of a large model and several percent of a small model.

PER_HEAD = "head"
PER_ELEMENT = "element"
PER_PROJECTION = "projection"
ALL, IN_WINDOWS = "all", "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """The vector parameters of a layer; the default is Llama's: two norms, no bias.

    Attributes:
        qkv_bias: the query, key and value projections have biases.
        output_bias: the output projection of attention has a bias.
        mlp_bias: the matrices of the MLP have biases.
        router_bias: the router of a mixture of experts has a bias.
        norm_bias: norms have a bias in addition to their weight.
        head_bias: the output embedding has a bias.
        layer_norms: number of norms of one layer, each as wide as the hidden size.
        expert_norms: number of further norms of a layer with experts.
        query_key_norm: norm of queries and keys: "" (none), "head" (one weight for all heads), or
            "projection" (weight as wide as the projection).
        sinks: layers whose attention has a learned sink logit for each query head: "" (none),
            "all", or "window" (those with a sliding window).
        output_gate: the outputs of attention have a gate: "" (none), "element", or "head" (one
            number for each query head).
        shared_gate: the shared experts of a layer have a gate of one element.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    router_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    layer_norms: int = 2
    expert_norms: int = 0
    query_key_norm: str = ""
    sinks: str = ""
    output_gate: str = ""
    shared_gate: bool = False

    def attention_parameters(self, heads: HeadShape, layer: LayerSpec, qkv: int) -> int:
        """Return the vector parameters of one layer's attention, without the output bias.

        Args:
            heads: heads of the layer.
            layer: the layer.
            qkv: outputs of its projections of queries, keys and values.
        """
        own = layer.source is None
        if (
            heads.latent is not None and not layer.keys_from_values
        ):  # norms of the compressed queries and of the latent
            rank = heads.latent.query_rank or 0
            biased = rank + heads.value_dim + heads.key_dim if self.qkv_bias else 0
            return rank + heads.value_dim + biased + 2 * heads.index_dim
        kv_heads, dim = heads.kv_heads if own else 0, heads.projected_dims[0]
        in_all = (heads.query_heads + kv_heads) * dim
        norms = {PER_HEAD: dim * (2 if own else 1), PER_PROJECTION: in_all}
        has_sinks = self.sinks == ALL or (self.sinks == IN_WINDOWS and layer.window is not None)
        return (
            (qkv if self.qkv_bias else 0)
            + norms.get(self.query_key_norm, 0)
            + (heads.query_heads if has_sinks else 0)
        )

    def norm_parameters(self, hidden_size: int) -> int:
        """Return the parameters of one norm of the residual stream."""
        return hidden_size * (2 if self.norm_bias else 1)


PLAIN = VectorSpec()
"""Two norms, no bias."""

_ALL_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True}
_IMPLIED: Mapping[str, Mapping[str, bool | int | str]] = {
    "axk1": {"expert_norms": 1},
    "cohere": {"layer_norms": 1},
    "cohere2": {"layer_norms": 1},
    "gemma2": {"layer_norms": 4},
    "gemma3": {"layer_norms": 4, "query_key_norm": PER_HEAD},
    "gemma3_text": {"layer_norms": 4, "query_key_norm": PER_HEAD},
    # LAuReL, AltUp and per-layer embeddings have a norm each, AltUp a scale
    "gemma3n_text": {"layer_norms": 8, "query_key_norm": PER_HEAD},
    "gemma4_text": {"layer_norms": 4, "query_key_norm": PER_HEAD},
    "gemma4_unified_text": {"layer_norms": 4, "query_key_norm": PER_HEAD},
    "glm": {"qkv_bias": True},
    "glm4": {"qkv_bias": False, "layer_norms": 4},
    "gpt2": _ALL_BIASES,
    "gpt_bigcode": _ALL_BIASES,
    "gpt_neox": _ALL_BIASES,
    "gpt_oss": {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "router_bias": True,
        "sinks": ALL,
    },
    "mimo_v2_flash": {"sinks": IN_WINDOWS},
    **{
        kind: {"layer_norms": 1}
        for kind in ("falcon_mamba", "mamba", "mamba2", "nemotron_h", *SHARED_BLOCKS)
    },
    "olmo2": {"query_key_norm": PER_PROJECTION},
    "olmo3": {"query_key_norm": PER_PROJECTION},
    "opt": _ALL_BIASES,
    "persimmon": _ALL_BIASES,
    "phi": {**_ALL_BIASES, "head_bias": True, "layer_norms": 1},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"query_key_norm": PER_HEAD},
    "qwen3_moe": {"query_key_norm": PER_HEAD},
    **{
        kind: {"query_key_norm": PER_HEAD, "output_gate": PER_ELEMENT, "shared_gate": True}
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    **{kind: {"query_key_norm": PER_HEAD} for kind in ("lfm2", "lfm2_moe", "lara_mini")},
    "lfm3": {"layer_norms": 4, "query_key_norm": PER_HEAD, "output_gate": PER_HEAD},
    "bailing_hybrid": {"output_gate": PER_HEAD},
    "olmo_hybrid": {"query_key_norm": PER_PROJECTION},
    "stablelm": {"norm_bias": True},
    "starcoder2": _ALL_BIASES,
}
# Keys of config.json and the vectors that each key enables or disables.
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("qkv_bias", "output_bias"),
    "qkv_bias": ("qkv_bias",),
    "use_qkv_bias": ("qkv_bias",),
    "mlp_bias": ("mlp_bias",),
    "enable_bias": ("qkv_bias", "output_bias", "mlp_bias"),
    "use_bias": ("qkv_bias", "output_bias", "mlp_bias"),
}
_WITHOUT_OUTPUT_BIAS = frozenset({"glm", "glm4", "helium", "mimo_v2_flash"})
_WITHOUT_SWITCHES = frozenset({"phi", "phi3", "qwen2"})


def read_vectors(reader: ConfigReader) -> VectorSpec:
    """Return the vector parameters of a layer, from the model type and the flags in its config.

    Raises:
        ModelError: a flag is neither true nor false.
    """
    fields: dict[str, Any] = dict(_IMPLIED.get(reader.model_type, {}))
    switches = {} if reader.model_type in _WITHOUT_SWITCHES else _SWITCHES
    for key, switched in switches.items():
        if reader.find(key) is not None:
            fields.update(dict.fromkeys(switched, reader.flag(key, default=False)))
    if reader.model_type in _WITHOUT_OUTPUT_BIAS:
        fields["output_bias"] = False
    if reader.model_type == "gemma4_text":
        if reader.optional_integer("hidden_size_per_layer_input"):
            fields["layer_norms"] += 1
        if reader.flag("enable_moe_block", default=False):  # three norms, and scales of the router
            fields["layer_norms"] += 4
            fields["router_bias"] = True
    return VectorSpec(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer.

    Attributes:
        architecture: `model_type` of config.json.
        num_layers: attention layers.
        num_heads: query heads.
        num_kv_heads: key and value heads (GQA: fewer than query heads; MQA: one).
        head_dim: elements of a query and of a key.
        hidden_size: width of the residual stream.
        intermediate_size: width of the dense MLP; of the widest.
        vocab_size: rows of the embedding.
        max_positions: the context, in tokens.
        tied_embeddings: input and output embeddings are one matrix.
        gated_mlp: the MLP has a gate (three matrices instead of two).
        layers: one LayerSpec per layer.
        learned_positions: rows of the table of learned position embeddings; 0 if there is none.
        adds_positions: position embeddings, learned or sinusoidal, are added to the embeddings.
        embedding_size: width of the embeddings if it is not the hidden size (OPT-350M).
        mixture: the expert layers of a mixture of experts; None for a dense model.
        vectors: biases, norms and sinks of a layer.
        value_dim: elements of a value; None: `head_dim`.
        latent: set if the layers have latent attention; see `HeadShape`.
        dense_sizes: widths of the dense MLPs, of the layers that have one; None: all have
            `intermediate_size`.
        extra: weights beside attention and MLP.
        heads: the heads of each layer; derived.
        attention: each kind of attention and heads with its number of layers; all layers that read
            other layers' KV count as readers of layer 0; derived.

    Raises:
        ConfigError: `num_heads` is not a multiple of `num_kv_heads`, or `layers` does not have
            `num_layers` entries.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    gated_mlp: bool
    layers: tuple[LayerSpec, ...]
    learned_positions: int = 0
    adds_positions: bool = False
    embedding_size: int | None = None
    mixture: MixtureSpec | None = None
    vectors: VectorSpec = PLAIN
    value_dim: int | None = None
    latent: LatentSpec | None = None
    dense_sizes: tuple[int, ...] | None = None
    extra: ExtraSpec = ExtraSpec()
    heads: tuple[HeadShape, ...] = field(init=False, repr=False, compare=False)
    # cached: read in every step of a simulation
    attention: tuple[tuple[LayerSpec, HeadShape, int], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        shape = self._model_heads
        heads = tuple(shape if layer.heads is None else layer.heads for layer in self.layers)
        object.__setattr__(self, "heads", heads)
        kinds = (replace(layer, source=layer.source and 0) for layer in self.layers)
        counts = Counter(pair for pair in zip(kinds, heads, strict=True) if pair[0].attends)
        attention = tuple((layer, shape, count) for (layer, shape), count in counts.items())
        object.__setattr__(self, "attention", attention)
        if len(self.layers) != self.num_layers:
            raise ConfigError(f"expected {self.num_layers} layers, got {len(self.layers)}")

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "ModelSpec":
        """Create the spec from the config.json of a decoder whose KV is layers x heads x tokens.

        Args:
            config: the parsed file; a nested `text_config` is read.

        Raises:
            ModelError: a key is missing or has an invalid value; the message names the key.
            UnsupportedModel: the architecture's KV cannot be stored in pages; states the reason.
        """
        reader = ConfigReader(config)
        _refuse(reader)
        hidden_size = reader.integer("hidden_size", "n_embd", "n_embed", "d_model")
        num_layers = reader.num_layers()
        if num_layers is None:
            raise reader.missing("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        num_heads = _num_heads(reader)
        max_positions = reader.integer(
            "max_position_embeddings",
            "n_positions",
            "model_max_length",
            "max_sequence_length",
            "max_seq_len",
            "seq_length",
            "n_ctx",
        )
        kind = reader.model_type
        heads = _model_heads(reader, hidden_size, num_heads)
        extra_rows = LEARNED_POSITIONS.get(kind)
        layers, mixture = read_layers(reader, num_layers, heads), read_mixture(reader, num_layers)
        tied = reader.flag("tie_word_embeddings", default=kind in TIED_BY_DEFAULT)
        alone = _layers_alone(reader)
        has_mlp = alone is None or NO_CACHE in alone
        dense_sizes = _dense_sizes(reader, layers, hidden_size) if has_mlp else (0,) * num_layers
        widest = max(dense_sizes)
        if alone is not None:
            dense_sizes = tuple(
                size for size, kind in zip(dense_sizes, alone, strict=True) if kind == NO_CACHE
            )
        elif kind in SHARED_BLOCKS:
            of_layers = zip(dense_sizes, layers, strict=True)
            dense_sizes = tuple(size for size, layer in of_layers if layer.attends)
        elif mixture is not None and kind not in DENSE_BESIDE_EXPERTS:
            sparse = _expert_layers(reader, num_layers)
            dense_sizes = tuple(s for layer, s in enumerate(dense_sizes) if layer not in sparse)
        return cls(
            architecture=kind,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.key_dim,
            value_dim=heads.value_dim,
            latent=heads.latent,
            hidden_size=hidden_size,
            intermediate_size=widest,
            vocab_size=reader.integer("vocab_size"),
            max_positions=max_positions,
            tied_embeddings=tied,
            gated_mlp=kind not in UNGATED,
            layers=layers,
            learned_positions=0 if extra_rows is None else max_positions + extra_rows,
            adds_positions=extra_rows is not None or kind in SINUSOIDAL_POSITIONS,
            embedding_size=reader.positive_integer("word_embed_proj_dim"),
            mixture=mixture,
            vectors=read_vectors(reader),
            dense_sizes=None
            if mixture is None and dense_sizes == (widest,) * num_layers
            else dense_sizes,
            extra=read_extra(reader, heads, sum(layer.attends for layer in layers), tied=tied),
        )

    @property
    def dims(self) -> frozenset[tuple[int, int]]:
        """Elements of keys and of values, for each shape of heads."""
        return frozenset((heads.key_dim, heads.value_dim) for heads in self.heads)

    @property
    def _model_heads(self) -> HeadShape:
        return HeadShape(
            query_heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim if self.value_dim is None else self.value_dim,
            latent=self.latent,
        )

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers; in some families each has two attention layers."""
        return self.num_layers // (2 if self.architecture in TWO_ATTENTIONS else 1)

    @property
    def joins_keys(self) -> bool:
        """Whether a layer that can evict stores only a part of its keys beside the values."""
        pairs = zip(self.heads, self.layers, strict=True)
        return any(heads.latent is not None and layer.stores_all for heads, layer in pairs)

    @property
    def kv_layers(self) -> int:
        """Number of layers that store keys and values."""
        return sum(layer.stores for layer in self.layers)

    @property
    def state_values(self) -> int:
        """Elements of the recurrent states of one sequence, of all layers."""
        shapes = (
            shape
            for layer in self.layers
            if layer.state is not None
            for shape in layer.state.shapes.values()
        )
        return sum(map(math.prod, shapes))

    @property
    def kv_values_per_layer_token(self) -> float:
        """Elements that a layer with keys and values stores per token; the mean over layers."""
        return self.kv_values_per_token / self.kv_layers

    @property
    def kv_values_per_token(self) -> int:
        """Elements that all layers store per token: a key and a value per KV head and layer."""
        return sum(
            heads.values_per_token
            for heads, layer in zip(self.heads, self.layers, strict=True)
            if layer.stores
        )

    def kv_bytes_per_token(self, bytes_per_value: int | float) -> int:
        """Return the bytes of one token in all layers, ignoring windows."""
        return math.ceil(self.kv_values_per_token * bytes_per_value)

    def kv_bytes(
        self, tokens: int, bytes_per_value: int | float, *, read_in_step: bool = False
    ) -> int:
        """Return the bytes of one sequence's KV; window layers hold at most their window.

        Args:
            tokens: length of the sequence.
            bytes_per_value: 2 for fp16 and bf16, 0.5 for a 4-bit codec without its metadata.
            read_in_step: count the bytes that a decode step reads: those that several layers read
                count for each of them, and of the tokens that an index leaves out only index keys.

        Raises:
            ConfigError: a negative length.
        """
        if tokens < 0:
            raise ConfigError(f"expected tokens of 0 or more, got {tokens}")
        values = 0
        for heads, layer in zip(self.heads, self.layers, strict=True):
            if layer.stores or (read_in_step and layer.attends):
                seen = read = layer.seen_tokens(tokens)
                if read_in_step and heads.index is not None:
                    read = min(seen, heads.index.topk)
                values += seen * heads.index_dim
                values += read * (heads.values_per_token - heads.index_dim)
        return math.ceil(values * bytes_per_value)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, experts, biases and norms included."""
        mixture = self.mixture
        if mixture is None:
            return self._parameters(0) - self.extra.counted_twice
        unused = 2 * self.hidden_size * mixture.expert_size * mixture.zero_experts
        return self._parameters(mixture.num_experts) + mixture.num_layers * unused

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: of the routed experts only the active ones."""
        experts = self.mixture.experts_per_token if self.mixture else 0
        return self._parameters(experts)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all decoder layers, experts included."""
        return self.num_parameters - self._other_parameters

    def weight_bytes(self, bytes_per_value: int | float) -> int:
        """Return the bytes of all weights in one type."""
        return math.ceil(self.num_parameters * bytes_per_value)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of one embedding matrix, vocabulary x width."""
        return self.vocab_size * (self.embedding_size or self.hidden_size)

    @property
    def lookup_parameters(self) -> int:
        """Number of parameters of lookup tables, of which a step reads only a few rows."""
        table = 0 if self.tied_embeddings else self.embedding_parameters
        return table + self.learned_positions * self.hidden_size + self._layer_embeddings

    @property
    def _layer_embeddings(self) -> int:
        return self.extra.layer_vocab * self.num_layers * self.extra.layer_width

    @property
    def projections(self) -> tuple[int, int]:
        """Weights of all layers' projections: of queries, keys and values, and of the output."""
        each = [self._projections(*x) for x in zip(self.heads, self.layers, strict=True)]
        qkv, output = (sum(weights) for weights in zip(*each, strict=True))
        return qkv, output

    def _projections(self, heads: HeadShape, layer: LayerSpec) -> tuple[int, int]:
        """Weights of a layer's projections of queries, keys and values, and of the output."""
        if not layer.attends:
            return 0, 0
        query_dim, output_dim = heads.projected_dims
        if self.architecture in TWICE_THE_VALUE_DIM:
            output_dim //= 2  # two query heads attend to the same pairs, and are subtracted
        queries, outputs = heads.query_heads * query_dim, heads.query_heads * output_dim
        if heads.latent is not None and not layer.keys_from_values:
            rank = heads.latent.query_rank
            of_queries = queries * self.hidden_size
            if rank is not None:
                of_queries = rank * (self.hidden_size + queries)
            if heads.index is not None:
                of_queries += heads.index.heads * (self.hidden_size + (rank or 0) * heads.index.dim)
            stored = self.hidden_size * heads.values_per_token + heads.values_per_expansion
            return of_queries + stored, self.hidden_size * outputs
        kv_heads = 0 if layer.source is not None else heads.kv_heads
        stored = kv_heads * (query_dim + (0 if layer.keys_from_values else output_dim))
        return self.hidden_size * (queries + stored), self.hidden_size * outputs

    def _parameters(self, experts: int) -> int:
        attention = sum(
            self._attention_parameters(heads, layer) + self._query_experts(heads, experts)
            for heads, layer in zip(self.heads, self.layers, strict=True)
        )
        norms = self.vectors.layer_norms * self.vectors.norm_parameters(self.hidden_size)
        each = norms + self.extra.layer_parameters(self.hidden_size)
        layers = attention + self.num_layers * each + self._mlp_parameters(experts)
        return layers + self._other_parameters

    def _query_experts(self, heads: HeadShape, experts: int) -> int:
        """Weights of a layer's other query heads, of which a router selects those of a token."""
        if self.architecture not in QUERY_EXPERTS or self.mixture is None:
            return 0
        width = heads.query_heads // self.mixture.experts_per_token * heads.key_dim
        unused = 2 * width * (experts - self.mixture.experts_per_token)
        return self.hidden_size * (unused + self.mixture.num_experts)

    def _attention_parameters(self, heads: HeadShape, layer: LayerSpec) -> int:
        state = 0 if layer.state is None else layer.state.parameters
        if not layer.attends:
            return state
        qkv, outputs = self._projections(heads, layer)
        vectors = self.vectors.attention_parameters(heads, layer, qkv // self.hidden_size)
        output_bias = self.hidden_size if self.vectors.output_bias else 0
        gates = {PER_ELEMENT: outputs, PER_HEAD: self.hidden_size * heads.query_heads}
        gate = gates.get(self.vectors.output_gate, 0)
        block = self.extra.in_block if state else 0
        return qkv + outputs + vectors + output_bias + gate + state + block

    @property
    def _other_parameters(self) -> int:
        """Number of parameters outside layers: embeddings, positions, projections, head, norm."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        projections = 2 * (self.embedding_size or 0) * self.hidden_size
        if self.embedding_size == self.hidden_size:
            projections = 0
        positions = self.learned_positions * self.hidden_size
        head_bias = self.vocab_size if self.vectors.head_bias else 0
        norm = self.vectors.norm_parameters(self.hidden_size)
        extra = self.extra.model_parameters(self.hidden_size, self.num_layers)
        own = embeddings + projections + positions + norm + head_bias
        return own + extra + self._layer_embeddings

    def _mlp_parameters(self, experts: int) -> int:
        sparse = 0 if self.mixture is None else self.mixture.num_layers
        sizes = self.dense_sizes
        if sizes is None:
            sizes = (self.intermediate_size,) * (self.num_layers - sparse)
        dense = sum(map(self._one_mlp, sizes))
        if self.mixture is None:
            return dense
        shared = self._one_mlp(self.mixture.shared_size) if self.mixture.shared_size else 0
        routed = self.mixture.num_experts + self.mixture.zero_experts
        router = (self.hidden_size + self.vectors.router_bias) * routed
        if width := self.mixture.router_width:
            router = width * (self.hidden_size + routed + 2 * width + 6)
            dense -= width  # the first layer's router has no earlier one
        norms = self.vectors.expert_norms * self.vectors.norm_parameters(self.hidden_size)
        norms += self.hidden_size if self.vectors.shared_gate and shared else 0
        wide = experts * self._one_mlp(self.mixture.expert_size) + shared + router + norms
        return sparse * wide + dense

    def _one_mlp(self, width: int) -> int:
        matrices = 3 if self.gated_mlp else 2
        biases = (matrices - 1) * width + self.hidden_size if self.vectors.mlp_bias else 0
        return matrices * self.hidden_size * width + biases


def _refuse(reader: ConfigReader) -> None:
    for key, why in REFUSED.items():
        if reader.find(key):
            raise UnsupportedModel(
                f"{reader.model_type} models are not supported: {why} ({key!r} in config.json)"
            )


def _model_heads(reader: ConfigReader, hidden_size: int, num_heads: int) -> HeadShape:
    rank = reader.positive_integer("kv_lora_rank")
    if rank is not None:
        return HeadShape(
            query_heads=num_heads,
            kv_heads=1,
            key_dim=reader.integer("qk_rope_head_dim"),
            value_dim=rank,
            latent=LatentSpec(
                key_dim=reader.integer("qk_nope_head_dim"),
                value_dim=reader.positive_integer("v_head_dim") or hidden_size // num_heads,
                query_rank=None
                if reader.is_null("q_lora_rank")
                else reader.positive_integer("q_lora_rank"),
            ),
        )
    head_dim = _head_dim(reader, hidden_size, num_heads)
    twice = reader.model_type in TWICE_THE_VALUE_DIM
    return HeadShape(
        query_heads=num_heads,
        kv_heads=_num_kv_heads(reader, num_heads),
        key_dim=head_dim,
        value_dim=reader.positive_integer("v_head_dim") or head_dim * (2 if twice else 1),
    )


def _num_heads(reader: ConfigReader) -> int:
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    if reader.model_type in QUERY_EXPERTS:  # config.json leaves it out
        return reader.integer("num_key_value_heads") * reader.integer("num_experts_per_tok")
    return reader.integer(*names)


def _num_kv_heads(reader: ConfigReader, num_heads: int) -> int:
    # Falcon configs always have num_kv_heads, but the older architecture ignores it
    regular = not reader.flag("multi_query", default=False)
    if regular or reader.flag("new_decoder_architecture", default=False):
        found = reader.positive_integer(
            "num_key_value_heads", "num_kv_heads", "attn_config.kv_n_heads"
        )
        num_kv_heads = found or num_heads
    else:
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of"
            f" num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    head_dim = reader.positive_integer("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ModelError(
            f"config.json has no 'head_dim', and hidden_size={hidden_size} is not a multiple of"
            f" num_attention_heads={num_heads}: add 'head_dim'"
        )
    return hidden_size // num_heads
