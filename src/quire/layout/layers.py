"""Layers of a model from its config: sliding windows, experts, and vector parameters.

A config has five keys for windows, read in this order: `use_sliding_window: false`; the list
`layer_types`; GPT-Neo's `attention_types`; the period `sliding_window_pattern`, whose last layer
has full attention; `max_window_layers`, below which all layers have full attention. Otherwise
`sliding_window` applies to all layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.errors import ModelError, UnsupportedModel
from quire.layout.config import MOST_LAYERS, ConfigReader, shown
from quire.layout.families import WINDOW_IGNORED

# Layers with full attention and layers with a sliding window.

_KINDS = {
    "full_attention": False,
    "global": False,
    "attention": False,
    "sliding_attention": True,
    "local": True,
}


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens; None for full attention.

    With a window W, a query at position p attends to positions > p - W, its own included.

    Raises:
        ModelError: the list of layers has another length, or the window size is missing.
        UnsupportedModel: a layer has neither full nor sliding-window attention.
    """
    if not reader.flag("use_sliding_window", default=True):
        return (None,) * num_layers
    window = _window(reader)
    sliding = _sliding(reader, num_layers, windowed=window is not None)
    if window is None and any(sliding):
        raise reader.missing("sliding_window")
    return tuple(window if slides else None for slides in sliding)


def _window(reader: ConfigReader) -> int | None:
    if reader.model_type in WINDOW_IGNORED:
        return None
    # null: no window; absent key: the family's default; 0: null in old files
    if reader.is_null("sliding_window"):
        return None
    return reader.optional_integer("sliding_window", "window_size") or None


def _sliding(reader: ConfigReader, num_layers: int, *, windowed: bool) -> Sequence[bool]:
    kinds = _kinds(reader)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelError(
                f"config.json lists the attention types of {len(kinds)} layers, but the model has"
                f" {num_layers}: make 'layer_types' and 'num_hidden_layers' agree"
            )
        return [_slides(kind) for kind in kinds]
    if not windowed:
        return [False] * num_layers
    period = reader.optional_integer("sliding_window_pattern", "_sliding_window_pattern")
    if period:
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    first = reader.optional_integer("max_window_layers") or 0
    return [layer >= first for layer in range(num_layers)]


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
        case [cycle, int(times)] if 0 <= times <= MOST_LAYERS:
            for _ in range(times):
                yield from _listed(cycle)
        case _:
            raise ModelError(
                f"config.json: 'attention_types' holds {shown(pair)}, expected pairs of a list of "
                "layer types and its number of repetitions"
            )


def _listed(cycle: object) -> Iterable[object]:
    return cycle if isinstance(cycle, list) else [cycle]


def _slides(kind: object) -> bool:
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

    def attention_parameters(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Return the vector parameters of one layer's attention, without the output bias."""
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        norms = {PER_HEAD: 2 * head_dim, PER_PROJECTION: queries + keys}.get(self.query_key_norm, 0)
        biases = queries + 2 * keys if self.qkv_bias else 0
        return biases + norms + (num_heads if self.sinks else 0)

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
