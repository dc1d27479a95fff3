"""Reader of config.json files, with key aliases and validation of types and ranges.

The reader handles keys and types. The meaning of values is defined in `model` and `layers`. The
tables of defaults that a `model_type` implies for missing keys have the values of the configuration
classes of Transformers; a test compares both.
"""

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeGuard

from quire.errors import ModelError, UnknownName

PARTIAL_ROPE = "proportional"
"""The RoPE type of Transformers that rotates a fraction of a head; the rest of the head stays."""

_GEMMA3: Mapping[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_GEMMA4: Mapping[str, object] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131_072, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "rope_parameters": {
        "full_attention": {"rope_type": PARTIAL_ROPE, "partial_rotary_factor": 0.25}
    },
}  # fmt: skip

_DEEPSEEK: Mapping[str, object] = {
    "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
_INDEX: Mapping[str, object] = {"index_topk": 2048, "index_n_heads": 16, "index_head_dim": 128}
_MAMBA: Mapping[str, object] = {"num_attention_heads": 1, "max_position_embeddings": 1 << 20}
_WITHOUT_EXPERTS: Mapping[str, object] = {"n_routed_experts": None, "moe_intermediate_size": None}

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "axk1": {
        **_DEEPSEEK, "vocab_size": 163_840, "num_attention_heads": 64, "n_routed_experts": 192,
        "first_k_dense_replace": 1, "max_position_embeddings": 32_768,
    },
    "axk2": _INDEX,
    "bloom": {"seq_length": 2048},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": {
        **_DEEPSEEK, "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008,
        "moe_intermediate_size": 1407, "num_hidden_layers": 32, "num_attention_heads": 32,
        "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": None,
        "first_k_dense_replace": 0, "max_position_embeddings": 2048,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_INDEX, "index_n_heads": 64},
    "dots3_note_text": {**_INDEX, "index_n_heads": 64},
    "falcon": {"max_position_embeddings": 2048, "multi_query": True},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384,
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32_768, "sliding_window": 512,
        "sliding_window_pattern": 5, "num_kv_shared_layers": 15, "laurel_rank": 64,
        "altup_num_inputs": 4, "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {
        **_GEMMA4, "max_position_embeddings": 262_144, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "glm4_moe_lite": {
        **_DEEPSEEK, "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
        "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "max_position_embeddings": 202_752,
    },
    "glm_moe_dsa": {**_INDEX, "index_n_heads": 32},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"window_size": 256},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "llama4_text": {
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "attention_chunk_size": 8192, "num_local_experts": 16, "num_experts_per_tok": 1,
        "n_shared_experts": 1,
    },
    "hy_v4": {**_INDEX, "index_topk_freq": 4},
    "longcat_flash": {
        "vocab_size": 131_072, "hidden_size": 6144, "ffn_hidden_size": 12_288,
        "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64,
        "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 131_072, "decoder_sparse_step": 2,
    },
    "mimo_v2_flash": {
        "vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384,
        "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "max_position_embeddings": 131_072, "sliding_window": 129, "sliding_window_pattern": 6,
        "max_window_layers": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    "falcon_mamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "minicpm3": {
        **_DEEPSEEK, **_WITHOUT_EXPERTS, "vocab_size": 73_448, "hidden_size": 2560,
        "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40,
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": None, "max_position_embeddings": 32_768,
    },
    "mistral": {"sliding_window": 4096},
    "mistral4": {
        **_DEEPSEEK, "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "n_routed_experts": 128,
        "num_experts_per_tok": 4, "first_k_dense_replace": 0, "kv_lora_rank": 256,
        "q_lora_rank": 1024, "qk_nope_head_dim": 64, "max_position_embeddings": 1_048_576,
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False},
    "sarvam_mla": {
        **_DEEPSEEK, "vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384,
        "num_hidden_layers": 32, "num_attention_heads": 64, "n_routed_experts": 128,
        "first_k_dense_replace": 1, "q_lora_rank": None,
    },
    "smollm3": {"use_sliding_window": False},
    "vaultgemma": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "youtu": {
        **_DEEPSEEK, **_WITHOUT_EXPERTS, "vocab_size": 128_256, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
        "max_position_embeddings": 131_072,
    },
}  # fmt: skip
"""Values of missing keys, by model type."""

TIED_BY_DEFAULT = frozenset(
    {
        "biogpt", "bloom", "cohere", "cohere2", "ctrl", "ernie4_5", "ernie4_5_moe", "falcon",
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text",
        "gemma4_unified_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese",
        "granite_swa", "jetmoe", "minicpm3", "mpt", "openai-gpt", "opt",
        "smollm3", "starcoder2", "vaultgemma", "xglm", "youtu",
    }
)  # fmt: skip
"""Families whose `tie_word_embeddings` is true by default."""

UNGATED = frozenset(
    {
        "apertus", "apertus1p5_text", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon",
        "fuyu", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "jais2",
        "mpt", "nanochat", "nemotron", "nemotron_h", "openai-gpt", "opt", "persimmon", "phi",
        "starcoder2", "xglm",
    }
)  # fmt: skip
"""Families whose MLP has no gate; the default of its width is 4 * hidden size."""

LEARNED_POSITIONS: Mapping[str, int] = {
    "biogpt": 2,
    "gpt2": 0,
    "gpt_bigcode": 0,
    "gpt_neo": 0,
    "openai-gpt": 0,
    "opt": 2,
}
"""Families with learned position embeddings, and the rows of the table beyond the context."""

SINUSOIDAL_POSITIONS = frozenset({"ctrl", "xglm"})
"""Families that add sinusoidal position embeddings, which are no parameters."""

TWICE_THE_VALUE_DIM = frozenset({"diffllama"})
"""Families whose query heads attend to pairs of values."""

QUERY_EXPERTS = frozenset({"jetmoe"})
"""Families in which a router selects the query heads of a token, as it selects its experts."""

TWICE_THE_KV_HEADS = frozenset({"mimo_v2_flash"})
"""Families whose sliding-window layers have twice the KV heads of the others."""

WINDOW_WITHOUT_QUERY = frozenset({"mimo_v2_flash"})
"""Families that also have the key `sliding_window_size`, which does not count the query."""

LAST_LAYER_FULL = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Families whose last layer has full attention, whatever `layer_types` says."""

DENSE_BESIDE_EXPERTS = frozenset({"gemma4_text", "longcat_flash"})
"""Families whose layers with experts have a dense MLP too."""

TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Families whose decoder layers, counted by `num_layers`, have two attention layers each."""

ATTENTION_FREE = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Families whose layers have a recurrent state alone."""

ATTENTION_AND_STATE = frozenset({"falcon_h1"})
"""Families whose layers have attention and a recurrent state side by side."""

SHARED_BLOCKS = frozenset({"zamba", "zamba2"})
"""Families whose layers with attention share its weights and those of their MLP."""

WINDOW_IGNORED = frozenset({"llama"})
"""Families whose attention ignores `sliding_window`."""

REFUSED: Mapping[str, str] = {
    "cross_attention_layers": "it has cross-attention layers",
    "is_encoder_decoder": "it has an encoder",
    "type_vocab_size": "it is an encoder",
    "block_configs": "its layers have different head counts",
}
"""Keys that, if set, mean that KV is not layers x heads x tokens, with the reason."""
_NESTED = ("text_config", "language_config", "llm_config")
LARGEST_INTEGER = 2**31 - 1
"""Largest size in a config.json: kernels use 32-bit indices."""

SIZES = (
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim", "attention_head_dim", "kv_channels"),
    ("vocab_size",),
    ("intermediate_size", "ffn_dim", "n_inner", "dff"),
    ("max_position_embeddings", "n_positions", "model_max_length"),
    ("word_embed_proj_dim",),
)
"""Keys of sizes that are 1 or more in every model, with their aliases."""

ROTARY_FRACTIONS = ("partial_rotary_factor", "rotary_pct")
"""Keys of the fraction of a head that RoPE rotates; it determines the size of the cosine table."""

MAX_LAYERS = 10_000
"""Largest number of layers of a model; far above that of existing models."""


def read_config(folder: Path) -> dict[str, object]:
    """Read the config.json of a model folder.

    Args:
        folder: a local folder in Hugging Face format.

    Raises:
        ModelError: the folder or its config.json does not exist, or is not a JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"expected a model folder, got {str(folder)!r}: there is no such folder")
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: pass a folder in Hugging Face format")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, object]:
    """Read the JSON object in a file of a model folder.

    Raises:
        ModelError: the file cannot be read, is not JSON, is nested too deeply, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(
            f"{path} is not valid JSON: objects or lists are nested too deeply; expected one object"
        ) from error
    except ValueError as error:  # bad JSON, bad UTF-8, or an integer of too many digits
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def check_sizes(config: Mapping[str, object]) -> None:
    """Refuse invalid sizes and types before Transformers reads the config.

    Raises:
        ModelError: a size is not a positive integer, a fraction is not from 0 to 1, or the dtype is
            not a name; the message names the key.
    """
    reader = ConfigReader(config)
    num_layers = reader.num_layers()
    for names in SIZES:
        if names[0] == "intermediate_size":
            reader.sizes(num_layers or 1, *names)
        else:
            reader.positive_integer(*names)
    reader.dtype()
    for key in ("rope_parameters", "rope_scaling"):
        for name in ROTARY_FRACTIONS:
            reader.fraction(name)
            reader.fraction(f"{key}.{name}")


class ConfigReader:
    """Typed access to one config.json, with aliases, nested text models and family defaults.

    The config of a multimodal model has its decoder under `text_config`; that part is read. Only
    `tie_word_embeddings`, the dtype and other keys of the whole model are also read from the
    enclosing config.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        inner = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None)
        self._outer = config
        self._config: Mapping[str, object] = inner if isinstance(inner, Mapping) else config
        model_type = self._config.get("model_type") or config.get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else ""
        if not self.model_type:
            raise ModelError("config.json has no 'model_type': add the key (for example \"llama\")")
        self._defaults = DEFAULTS.get(self.model_type, {})

    def missing(self, *names: str) -> ModelError:
        """Return the error for a key that is missing or 0."""
        name, value = self._named(*names)
        if value is not None:
            return ModelError(
                f"config.json: {name!r} is {shown(value)}, expected an integer of 1 or more"
            )
        also = f" (also looked for {', '.join(names[1:])})" if names[1:] else ""
        return ModelError(
            f"config.json of this {self.model_type} model has no {names[0]!r}{also}: add the key"
        )

    def is_null(self, name: str) -> bool:
        """Return whether the key is present and null, which differs from an absent key."""
        return name in self._config and self._config[name] is None

    def find(self, *names: str) -> object:
        """Return the first value that is not null, or None; a dot separates nested keys."""
        return self._named(*names)[1]

    def _named(self, *names: str) -> tuple[str, object]:
        for source in (self._config, self._defaults):
            for name in names:
                value = _step(source, name)
                if value is not None:
                    return name, value
        return names[0], None

    def outer(self, name: str) -> object:
        """Return the value of a key as `find` does, else that of the enclosing configuration."""
        value = self.find(name)
        return self._outer.get(name) if value is None else value

    def integer(self, *names: str) -> int:
        """Return a required positive integer under the first of these names.

        Raises:
            ModelError: the key is missing, or its value is not a positive integer.
        """
        value = self.positive_integer(*names)
        if value is None:
            raise self.missing(*names)
        return value

    def positive_integer(self, *names: str) -> int | None:
        """Return an integer of 1 or more, or None if the key is missing or null.

        Raises:
            ModelError: the value is 0 or of another type.
        """
        return self._integer(names, at_least=1)

    def num_layers(self) -> int | None:
        """Return the number of attention layers, or None if the key is missing or null.

        Raises:
            ModelError: not a positive integer, or more than `MAX_LAYERS`.
        """
        name, _ = self._named("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        value = self.positive_integer(name)
        kinds = self.find("layers_block_type", "hybrid_override_pattern")
        if value is None and isinstance(kinds, str | list | tuple):  # Nemotron-H
            value = len(kinds)
        if value is not None and value > MAX_LAYERS:
            raise ModelError(f"config.json: {name!r} is {value}, expected {MAX_LAYERS} at most")
        pairs = name == "num_layers" and self.model_type in TWO_ATTENTIONS
        return 2 * value if value is not None and pairs else value

    def optional_integer(self, *names: str) -> int | None:
        """Return an integer of 0 or more, or None if the key is missing or null.

        Raises:
            ModelError: the value is of another type.
        """
        return self._integer(names, at_least=0)

    def sequence(self, *names: str) -> list[object] | None:
        """Return a list, or None if the key is missing or null.

        Raises:
            ModelError: the value is of another type.
        """
        name, value = self._named(*names)
        if value is not None and not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected a list")
        return None if value is None else list(value)

    def sizes(self, num_layers: int, *names: str) -> list[int] | None:
        """Return a positive integer of each layer, from a list or from one integer for all.

        Raises:
            ModelError: another value, or a list of another length.
        """
        name, value = self._named(*names)
        if not isinstance(value, list | tuple):
            size = self.positive_integer(*names)
            return None if size is None else [size] * num_layers
        found = [size for size in value if _is_integer(size) and 1 <= size <= LARGEST_INTEGER]
        if not len(found) == len(value) == num_layers:
            raise ModelError(
                f"config.json: {name!r} is {shown(value)}, expected an integer of 1 or more for "
                f"each of {num_layers} layers"
            )
        return found

    def integers(self, name: str) -> Collection[int]:
        """Return a list of integers, empty if the key is missing or null.

        Raises:
            ModelError: the value is of another type.
        """
        value = self.find(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_integer(item) for item in value):
            raise ModelError(
                f"config.json: {name!r} is {shown(value)}, expected a list of integers"
            )
        return value

    def _integer(self, names: tuple[str, ...], *, at_least: int) -> int | None:
        name, value = self._named(*names)
        if value is None:
            return None
        if not _is_integer(value) or not at_least <= value <= LARGEST_INTEGER:
            raise ModelError(
                f"config.json: {name!r} is {shown(value)}, expected an integer from {at_least} to "
                f"{LARGEST_INTEGER}"
            )
        return value

    def fraction(self, name: str) -> float | None:
        """Return a number from 0 to 1, or None if the key is missing or null.

        Raises:
            ModelError: the value is of another type or out of range.
        """
        value = self.find(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected 0 to 1")
        return float(value)

    def dtype(self) -> str | None:
        """Return the name of the weights' dtype, also from the enclosing configuration.

        Raises:
            ModelError: the value is not a name.
        """
        for name in ("dtype", "torch_dtype"):
            value = self.outer(name)
            if isinstance(value, str) and value:
                return value.removeprefix("torch.")
            if value is not None:
                raise ModelError(
                    f"config.json: {name!r} is {shown(value)}, expected the name of a dtype"
                )
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean, also from the enclosing configuration.

        Raises:
            ModelError: the value is of another type.
        """
        value = self.outer(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected true or false")
        return value


def shown(value: object) -> str:
    """Format a config value for a message, at most 200 characters; long text keeps its end."""
    text = reprlib.repr(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-77:]}"


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _step(source: Mapping[str, object], name: str) -> object:
    head, _, rest = name.partition(".")
    value = source.get(head)
    if not rest:
        return value
    return _step(value, rest) if isinstance(value, Mapping) else None


# The types of model weights, and their sizes.

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per value of each type, by its PyTorch name."""


def dtype_bytes(name: str) -> int:
    """Return the bytes of one value.

    Args:
        name: a key of `DTYPE_BYTES`, with or without the prefix `torch.`.

    Raises:
        UnknownName: the type is unknown; the message suggests the nearest names.
    """
    try:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    except KeyError:
        raise UnknownName("dtype", name, DTYPE_BYTES) from None
