"""Reading a config.json: one place for its many spellings and for what is wrong with it.

The reader knows keys and types. What the values mean lives in `model`, `windows` and `mixture`.
"""

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeGuard

from quire.errors import ModelError, UnknownName
from quire.layout.families import DEFAULTS

_NESTED = ("text_config", "language_config", "llm_config")
LARGEST_INTEGER = 2**31 - 1
"""Of any size in a config.json: indices of kernels are 32 bits wide."""

SIZES = (
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim",),
    ("vocab_size",),
    ("intermediate_size", "ffn_dim", "n_inner"),
    ("max_position_embeddings", "n_positions"),
    ("word_embed_proj_dim",),
)
"""Keys of sizes that are 1 or more in every model, with their aliases."""

ROTARY_FRACTIONS = ("partial_rotary_factor", "rotary_pct")
"""Keys of the fraction of a head that RoPE rotates; a table of so many cosines is built from it."""

MOST_LAYERS = 10_000
"""Of one model; far above the deepest that exist."""


def read_config(folder: Path) -> dict[str, object]:
    """The config.json of a model folder.

    Args:
        folder: a local folder in Hugging Face format.

    Raises:
        ModelError: no folder, no config.json in it, or not a JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"expected a model folder, got {str(folder)!r}: there is no such folder")
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: give a folder in Hugging Face format")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in a file of a model folder.

    Raises:
        ModelError: the file cannot be read, is not JSON, is nested too deeply, or holds no object.
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
    """Refuse sizes and types that no model can have, before Transformers reads the config.

    Raises:
        ModelError: a size is not a positive integer, or the dtype has no name; says which.
    """
    reader = ConfigReader(config)
    for names in SIZES:
        reader.positive_integer(*names)
    reader.num_layers()
    reader.dtype()
    for key in ("rope_parameters", "rope_scaling"):
        for name in ROTARY_FRACTIONS:
            reader.fraction(name)
            reader.fraction(f"{key}.{name}")


class ConfigReader:
    """Typed access to one config.json, with aliases, nested text models and family defaults.

    A model with several modalities keeps its decoder under `text_config`; that part is read, and
    only what belongs to the whole (`tie_word_embeddings`, the dtype) may come from the outside.
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
        """The error for a key that is not there."""
        also = f" (also looked for {', '.join(names[1:])})" if names[1:] else ""
        return ModelError(
            f"config.json of this {self.model_type} model has no {names[0]!r}{also}: add the key"
        )

    def is_null(self, name: str) -> bool:
        """Whether the key is written, and null: a statement, where an absent key is none."""
        return name in self._config and self._config[name] is None

    def find(self, *names: str) -> object:
        """The first value that is not null, or None; a dot steps into a nested object."""
        return self._named(*names)[1]

    def _named(self, *names: str) -> tuple[str, object]:
        for source in (self._config, self._defaults):
            for name in names:
                value = _step(source, name)
                if value is not None:
                    return name, value
        return names[0], None

    def outer(self, name: str) -> object:
        """Like `find`, then the same key of the enclosing configuration."""
        value = self.find(name)
        return self._outer.get(name) if value is None else value

    def integer(self, *names: str) -> int:
        """A required positive integer under the first of these names.

        Raises:
            ModelError: the key is missing, or its value is not a positive integer.
        """
        value = self.positive_integer(*names)
        if value is None:
            raise self.missing(*names)
        return value

    def positive_integer(self, *names: str) -> int | None:
        """An integer of 1 or more, or None when the key is missing or null.

        Raises:
            ModelError: the value is 0 or of another kind.
        """
        return self._integer(names, at_least=1)

    def num_layers(self) -> int | None:
        """The number of layers, or None when the key is missing or null.

        Raises:
            ModelError: not a positive integer, or more than `MOST_LAYERS`.
        """
        names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        value = self.positive_integer(*names)
        if value is not None and value > MOST_LAYERS:
            raise ModelError(
                f"config.json: {self._named(*names)[0]!r} is {value}, expected {MOST_LAYERS} at "
                "most"
            )
        return value

    def optional_integer(self, *names: str) -> int | None:
        """An integer of 0 or more, or None when the key is missing or null.

        Raises:
            ModelError: the value is of another kind.
        """
        return self._integer(names, at_least=0)

    def sequence(self, *names: str) -> list[object] | None:
        """A list, or None when the key is missing or null.

        Raises:
            ModelError: the value is of another kind.
        """
        name, value = self._named(*names)
        if value is not None and not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected a list")
        return None if value is None else list(value)

    def integers(self, name: str) -> Collection[int]:
        """A list of integers; empty when the key is missing or null.

        Raises:
            ModelError: the value is of another kind.
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
        """A number from 0 to 1, or None when the key is missing or null.

        Raises:
            ModelError: the value is of another kind.
        """
        value = self.find(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected 0 to 1")
        return float(value)

    def dtype(self) -> str | None:
        """The name of the weights' dtype, also from the enclosing configuration.

        Raises:
            ModelError: the value is no name.
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
        """A boolean, also from the enclosing configuration.

        Raises:
            ModelError: the value is of another kind.
        """
        value = self.outer(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name!r} is {shown(value)}, expected true or false")
        return value


def shown(value: object) -> str:
    """A value of a config in a message, at most 200 characters: a path keeps its end."""
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


# ---- dtypes --------------------------------------------------------------------------------------

# The number formats a model can be held in, and their size.

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per value of each format, by its PyTorch name."""


def dtype_bytes(name: str) -> int:
    """Bytes of one value.

    Args:
        name: a key of `DTYPE_BYTES`, with or without the prefix `torch.`.

    Raises:
        UnknownName: no such format; the message offers the nearest ones.
    """
    try:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    except KeyError:
        raise UnknownName("dtype", name, DTYPE_BYTES) from None
