"""Reading a config.json: one place for its many spellings and for what is wrong with it.

The reader knows keys and types. What the values mean lives in `model`, `windows` and `mixture`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ModelError
from quire.spec.families import DEFAULTS

_NESTED = ("text_config", "language_config", "llm_config")


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
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


class ConfigReader:
    """Typed access to one config.json, with aliases, nested text models and family defaults.

    A model with several modalities keeps its decoder under `text_config`; that part is read, and
    only what belongs to the whole (`tie_word_embeddings`, the dtype) may come from the outside.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        inner = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None)
        self._outer = config
        self._config: Mapping[str, object] = inner if isinstance(inner, Mapping) else config
        self.model_type = str(self._config.get("model_type") or config.get("model_type") or "")
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
        for source in (self._config, self._defaults):
            for name in names:
                value = _step(source, name)
                if value is not None:
                    return value
        return None

    def outer(self, name: str) -> object:
        """Like `find`, then the same key of the enclosing configuration."""
        value = self.find(name)
        return self._outer.get(name) if value is None else value

    def integer(self, *names: str) -> int:
        """A required positive integer under the first of these names.

        Raises:
            ModelError: the key is missing, or its value is not a positive integer.
        """
        value = self.optional_integer(*names)
        if value is None:
            raise self.missing(*names)
        if value == 0:
            raise ModelError(f"config.json: {names[0]!r} is 0, expected a positive integer")
        return value

    def optional_integer(self, *names: str) -> int | None:
        """An integer of 0 or more, or None when the key is missing or null.

        Raises:
            ModelError: the value is of another kind.
        """
        value = self.find(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"config.json: {names[0]!r} is {value!r}, expected a positive integer")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean, also from the enclosing configuration.

        Raises:
            ModelError: the value is of another kind.
        """
        value = self.outer(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name!r} is {value!r}, expected true or false")
        return value


def _step(source: Mapping[str, object], name: str) -> object:
    head, _, rest = name.partition(".")
    value = source.get(head)
    if not rest:
        return value
    return _step(value, rest) if isinstance(value, Mapping) else None
