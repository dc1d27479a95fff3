"""Parameters of a layer that are vectors: biases, gains of norms and attention sinks.

They are about 0.1 % of a large model's parameters and several percent of a small one's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.layout.config import ConfigReader

PER_HEAD = "head"
PER_PROJECTION = "projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """Which vectors a layer has; the default is Llama's: two norms, no bias.

    Attributes:
        qkv_bias: the query, key and value projections have biases.
        output_bias: the output projection of attention has a bias.
        mlp_bias: the matrices of the MLP have biases.
        router_bias: the router of a mixture of experts has a bias.
        norm_bias: norms have a bias beside their gain.
        head_bias: the output embedding has a bias.
        layer_norms: norms of one layer, each as wide as the hidden size.
        query_key_norm: gains for queries and keys: "" (none), "head" (one for all heads), or
            "projection" (as wide as the projection).
        sinks: attention has one learned sink for each query head.
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
        """Numbers of one layer's attention that are not in a matrix, the output bias left out."""
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        norms = {PER_HEAD: 2 * head_dim, PER_PROJECTION: queries + keys}.get(self.query_key_norm, 0)
        biases = queries + 2 * keys if self.qkv_bias else 0
        return biases + norms + (num_heads if self.sinks else 0)

    def norm_parameters(self, hidden_size: int) -> int:
        """Numbers of one norm of the residual stream."""
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
# Keys of config.json and the vectors each of them switches.
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
    """The vectors of a layer, by the model type and the switches in its config.

    Raises:
        ModelError: a switch is neither true nor false.
    """
    fields = dict(_IMPLIED.get(reader.model_type, {}))
    switches = {} if reader.model_type in _WITHOUT_SWITCHES else _SWITCHES
    for key, switched in switches.items():
        if reader.find(key) is not None:
            fields.update(dict.fromkeys(switched, reader.flag(key, default=False)))
    if reader.model_type in _WITHOUT_OUTPUT_BIAS:
        fields["output_bias"] = False
    return VectorSpec(**fields)  # type: ignore[arg-type]
