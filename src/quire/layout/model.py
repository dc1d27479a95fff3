"""ModelSpec: the shape of a decoder, read from its config.json, and the bytes derived from it.

No weights are read and torch is not imported: planning and admission use the same arithmetic.

Layers of a model from its config: sliding windows, experts, and vector parameters.

A config has five keys for windows, read in this order: `use_sliding_window: false`; the list
`layer_types`; GPT-Neo's `attention_types`; the period `sliding_window_pattern`, whose last layer
has full attention; `max_window_layers`, below which all layers have full attention. Otherwise
`sliding_window` applies to all layers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.errors import ConfigError, ModelError, UnsupportedModel
from quire.layout.config import (
    LEARNED_POSITIONS,
    MAX_LAYERS,
    REFUSED,
    TIED_BY_DEFAULT,
    TWICE_THE_KV_HEADS,
    UNGATED,
    WINDOW_IGNORED,
    ConfigReader,
    shown,
)

# Layers with full attention and layers with a sliding window.

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS = {
    FULL: FULL,
    "global": FULL,
    "attention": FULL,
    SLIDING: SLIDING,
    "local": SLIDING,
    CHUNKED: CHUNKED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of a layer's attention.

    Attributes:
        query_heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `query_heads`.
        key_dim: elements of a query and of a key.
        value_dim: elements of a value, and of the output of a query head.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

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
    def values_per_token(self) -> int:
        """Elements that a layer stores per token: a key and a value per KV head."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's attention.

    Attributes:
        window: sliding window W in tokens: a query at position p attends to positions > p - W.
            None: full or chunked attention.
        chunk: chunk C in tokens: a query at position p attends to positions >= p // C * C. None:
            full attention or a sliding window.
        source: the layer whose keys and values this layer reads; it stores none itself. None: it
            stores its own.
        heads: its heads if they differ from the other layers; None: those of the model.
    """

    window: int | None = None
    chunk: int | None = None
    source: int | None = None
    heads: HeadShape | None = None

    @property
    def stores_all(self) -> bool:
        """Whether it stores the keys and values of all tokens: only such layers can evict."""
        return self.source is None and self.window is None and self.chunk is None

    def held_tokens(self, tokens: int) -> int:
        """Return how many of a sequence's tokens this layer still needs."""
        if self.source is not None:
            return 0
        if self.chunk is not None:
            return min(tokens, (tokens - 1) % self.chunk + 1)
        return tokens if self.window is None else min(tokens, self.window)


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
    sizes = {FULL: None, SLIDING: _window(reader), CHUNKED: _chunk(reader)}
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in kinds and sizes[kind] is None:
            raise reader.missing(name)
    first_reader = num_layers - (reader.optional_integer("num_kv_shared_layers") or 0)
    sources = {kind: layer for layer, kind in enumerate(kinds[: max(first_reader, 0)])}
    found = []
    for layer, kind in enumerate(kinds):
        if layer >= first_reader and kind not in sources:
            raise ModelError(
                f"config.json: layer {layer} ({kind}) reads the keys and values of an earlier layer"
                f" of its type, and all have num_kv_shared_layers={num_layers - first_reader}"
            )
        shape = _layer_heads(reader, layer, kind, heads)
        found.append(
            LayerSpec(
                window=sizes[SLIDING] if kind == SLIDING else None,
                chunk=sizes[CHUNKED] if kind == CHUNKED else None,
                source=sources[kind] if layer >= first_reader else None,
                heads=None if shape == heads else shape,
            )
        )
    return tuple(found)


def _layer_heads(reader: ConfigReader, layer: int, kind: str, heads: HeadShape) -> HeadShape:
    """The heads of a layer: overrides of `per_layer_config`, or of its kind of attention."""
    own = ConfigReader({**_overrides(reader, layer, kind), "model_type": reader.model_type})
    key_dim = own.positive_integer("head_dim") or heads.key_dim
    kv_heads = own.positive_integer("num_key_value_heads") or heads.kv_heads
    if reader.model_type in TWICE_THE_KV_HEADS and kind == SLIDING:
        kv_heads = 2 * heads.kv_heads
    value_dim = own.positive_integer("v_head_dim") or (
        key_dim if heads.key_dim == heads.value_dim else heads.value_dim
    )
    return HeadShape(
        query_heads=own.positive_integer("num_attention_heads") or heads.query_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _overrides(reader: ConfigReader, layer: int, kind: str) -> Mapping[str, object]:
    by_layer = reader.find("per_layer_config")
    if isinstance(by_layer, Mapping):
        own = by_layer.get(layer, by_layer.get(str(layer), {}))
        return own if isinstance(own, Mapping) else {}
    if kind != FULL or reader.find("global_head_dim") is None:
        return {}
    own = {"head_dim": reader.find("global_head_dim")}
    if reader.flag("attention_k_eq_v", default=reader.model_type != "gemma4_text"):
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
        ((layer + 1) % period != 0 for layer in range(num_layers))
        if period
        else (layer >= first for layer in range(num_layers))
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
    # null: no window; absent key: the family's default; 0: null in old files
    if reader.is_null("sliding_window"):
        return None
    return reader.optional_integer("sliding_window", "window_size") or None


def _kinds(reader: ConfigReader) -> list[object] | None:
    kinds = reader.sequence("layer_types", "attention_layers")
    if kinds is not None:
        return kinds
    pairs = reader.sequence("attention_types")
    if pairs is None:
        return None
    # GPT-Neo: [[["global", "local"], 12]] repeats the inner list twelve times
    return [kind for pair in pairs for kind in _repeated(pair)]


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
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0


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
    if num_experts is None or num_experts <= 1:
        return None
    expert_size = reader.integer(
        "moe_intermediate_size", "ffn_config.ffn_hidden_size", "intermediate_size"
    )
    return MixtureSpec(
        num_layers=_expert_layers(reader, num_layers),
        num_experts=num_experts,
        experts_per_token=reader.integer(
            "num_experts_per_tok", "num_experts_per_token", "moe_k", "ffn_config.moe_top_k"
        ),
        expert_size=expert_size,
        shared_size=_shared_size(reader, expert_size),
    )


def _shared_size(reader: ConfigReader, expert_size: int) -> int:
    width = reader.optional_integer("shared_expert_intermediate_size", "shared_intermediate_size")
    if width is not None:
        return width
    shared = reader.optional_integer("n_shared_experts", "moe_num_shared_experts")
    return (shared or 0) * expert_size


def _expert_layers(reader: ConfigReader, num_layers: int) -> int:
    first = reader.optional_integer("first_k_dense_replace", "moe_layer_start_index") or 0
    step = reader.positive_integer("decoder_sparse_step") or 1
    dense_layers = reader.integers("mlp_only_layers")
    return sum(
        layer >= first and layer not in dense_layers and (layer + 1) % step == 0
        for layer in range(num_layers)
    )


# ---- vectors -------------------------------------------------------------------------------------

# Vector parameters of a layer: biases, norm weights and attention sinks.
#
# They are about 0.1 % of the parameters of a large model and several percent of a small model.

PER_HEAD = "head"
PER_PROJECTION = "projection"


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
        query_key_norm: norm of queries and keys: "" (none), "head" (one weight for all heads), or
            "projection" (weight as wide as the projection).
        sinks: attention has a learned sink logit for each query head.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    router_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    layer_norms: int = 2
    query_key_norm: str = ""
    sinks: bool = False

    def attention_parameters(self, heads: HeadShape, kv_heads: int) -> int:
        """Return the vector parameters of one layer's attention, without the output bias.

        Args:
            heads: heads of the layer.
            kv_heads: KV heads with projections; 0 if the layer reads those of another layer.
        """
        queries, keys = heads.query_heads * heads.key_dim, kv_heads * heads.key_dim
        key_norm = heads.key_dim if kv_heads else 0
        norms = {PER_HEAD: heads.key_dim + key_norm, PER_PROJECTION: queries + keys}
        biases = queries + keys + kv_heads * heads.value_dim if self.qkv_bias else 0
        own = norms.get(self.query_key_norm, 0)
        return biases + own + (heads.query_heads if self.sinks else 0)

    def norm_parameters(self, hidden_size: int) -> int:
        """Return the parameters of one norm of the residual stream."""
        return hidden_size * (2 if self.norm_bias else 1)


PLAIN = VectorSpec()
"""Two norms, no bias."""

_ALL_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True}
_IMPLIED: Mapping[str, Mapping[str, bool | int | str]] = {
    "cohere": {"layer_norms": 1},
    "cohere2": {"layer_norms": 1},
    "gemma2": {"layer_norms": 4},
    "gemma3": {"layer_norms": 4, "query_key_norm": PER_HEAD},
    "gemma3_text": {"layer_norms": 4, "query_key_norm": PER_HEAD},
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
        "sinks": True,
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
_WITHOUT_OUTPUT_BIAS = frozenset({"glm", "glm4", "helium"})
_WITHOUT_SWITCHES = frozenset({"phi", "phi3", "qwen2"})


def read_vectors(reader: ConfigReader) -> VectorSpec:
    """Return the vector parameters of a layer, from the model type and the flags in its config.

    Raises:
        ModelError: a flag is neither true nor false.
    """
    fields = dict(_IMPLIED.get(reader.model_type, {}))
    switches = {} if reader.model_type in _WITHOUT_SWITCHES else _SWITCHES
    for key, switched in switches.items():
        if reader.find(key) is not None:
            fields.update(dict.fromkeys(switched, reader.flag(key, default=False)))
    if reader.model_type in _WITHOUT_OUTPUT_BIAS:
        fields["output_bias"] = False
    return VectorSpec(**fields)  # type: ignore[arg-type]


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
        intermediate_size: width of the dense MLP.
        vocab_size: rows of the embedding.
        max_positions: the context, in tokens.
        tied_embeddings: input and output embeddings are one matrix.
        gated_mlp: the MLP has a gate (three matrices instead of two).
        layers: one LayerSpec per layer.
        learned_positions: rows of the table of position embeddings; 0 for RoPE.
        embedding_size: width of the embeddings if it is not the hidden size (OPT-350M).
        mixture: the expert layers of a mixture of experts; None for a dense model.
        vectors: biases, norms and sinks of a layer.
        value_dim: elements of a value; None: `head_dim`.
        heads: the heads of each layer; derived.

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
    embedding_size: int | None = None
    mixture: MixtureSpec | None = None
    vectors: VectorSpec = PLAIN
    value_dim: int | None = None
    heads: tuple[HeadShape, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = self._model_heads
        heads = tuple(shape if layer.heads is None else layer.heads for layer in self.layers)
        object.__setattr__(self, "heads", heads)
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
        num_heads = reader.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
        max_positions = reader.integer(
            "max_position_embeddings",
            "n_positions",
            "max_sequence_length",
            "max_seq_len",
            "seq_length",
            "n_ctx",
        )
        kind = reader.model_type
        head_dim = _head_dim(reader, hidden_size, num_heads)
        heads = HeadShape(
            query_heads=num_heads,
            kv_heads=_num_kv_heads(reader, num_heads),
            key_dim=head_dim,
            value_dim=reader.positive_integer("v_head_dim") or head_dim,
        )
        extra_rows = LEARNED_POSITIONS.get(kind)
        return cls(
            architecture=kind,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=heads.kv_heads,
            head_dim=head_dim,
            value_dim=heads.value_dim,
            hidden_size=hidden_size,
            intermediate_size=_intermediate_size(reader, hidden_size),
            vocab_size=reader.integer("vocab_size"),
            max_positions=max_positions,
            tied_embeddings=reader.flag("tie_word_embeddings", default=kind in TIED_BY_DEFAULT),
            gated_mlp=kind not in UNGATED,
            layers=read_layers(reader, num_layers, heads),
            learned_positions=0 if extra_rows is None else max_positions + extra_rows,
            embedding_size=reader.positive_integer("word_embed_proj_dim"),
            mixture=read_mixture(reader, num_layers),
            vectors=read_vectors(reader),
        )

    @property
    def _model_heads(self) -> HeadShape:
        return HeadShape(
            query_heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim if self.value_dim is None else self.value_dim,
        )

    @property
    def kv_layers(self) -> int:
        """Number of layers that store keys and values."""
        return sum(layer.source is None for layer in self.layers)

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
            if layer.source is None
        )

    def kv_bytes_per_token(self, bytes_per_value: int | float) -> int:
        """Return the bytes of one token in all layers, ignoring windows."""
        return math.ceil(self.kv_values_per_token * bytes_per_value)

    def kv_bytes(self, tokens: int, bytes_per_value: int | float) -> int:
        """Return the bytes of one sequence's KV; window layers hold at most their window.

        Args:
            tokens: length of the sequence.
            bytes_per_value: 2 for fp16 and bf16, 0.5 for a 4-bit codec without its metadata.

        Raises:
            ConfigError: a negative length.
        """
        if tokens < 0:
            raise ConfigError(f"expected tokens of 0 or more, got {tokens}")
        values = sum(
            layer.held_tokens(tokens) * heads.values_per_token
            for heads, layer in zip(self.heads, self.layers, strict=True)
        )
        return math.ceil(values * bytes_per_value)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, experts, biases and norms included."""
        experts = self.mixture.num_experts if self.mixture else 0
        return self._parameters(experts)

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
        return table + self.learned_positions * self.hidden_size

    def _parameters(self, experts: int) -> int:
        attention = sum(
            self._attention_parameters(heads, layer)
            for heads, layer in zip(self.heads, self.layers, strict=True)
        )
        norms = self.vectors.layer_norms * self.vectors.norm_parameters(self.hidden_size)
        layers = attention + self.num_layers * norms + self._mlp_parameters(experts)
        return layers + self._other_parameters

    def _attention_parameters(self, heads: HeadShape, layer: LayerSpec) -> int:
        kv_heads = heads.kv_heads if layer.source is None else 0
        queries, outputs = (heads.query_heads * x for x in (heads.key_dim, heads.value_dim))
        keys, values = (kv_heads * x for x in (heads.key_dim, heads.value_dim))
        matrices = self.hidden_size * (queries + keys + values + outputs)
        vectors = self.vectors.attention_parameters(heads, kv_heads)
        return matrices + vectors + (self.hidden_size if self.vectors.output_bias else 0)

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
        return embeddings + projections + positions + norm + head_bias

    def _mlp_parameters(self, experts: int) -> int:
        if self.mixture is None:
            return self.num_layers * self._one_mlp(self.intermediate_size)
        shared = self._one_mlp(self.mixture.shared_size) if self.mixture.shared_size else 0
        router = (self.hidden_size + self.vectors.router_bias) * self.mixture.num_experts
        wide = experts * self._one_mlp(self.mixture.expert_size) + shared + router
        dense = self.num_layers - self.mixture.num_layers
        return self.mixture.num_layers * wide + dense * self._one_mlp(self.intermediate_size)

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
    head_dim = reader.positive_integer("head_dim")
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ModelError(
            f"config.json has no 'head_dim', and hidden_size={hidden_size} is not a multiple of"
            f" num_attention_heads={num_heads}: add 'head_dim'"
        )
    return hidden_size // num_heads


def _intermediate_size(reader: ConfigReader, hidden_size: int) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size")
    width = reader.positive_integer(*names, "ffn_config.ffn_hidden_size")
    if width is not None:
        return width
    if reader.model_type in UNGATED:
        return 4 * hidden_size
    raise reader.missing(*names)
