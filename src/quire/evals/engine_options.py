"""Options of the engine by flat names, for programs that pass options as `name=value` pairs.

The names are those of the command line with underscores: kv_memory, kv_codec, evict, max_num_seqs.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import UnknownName
from quire.layout.options import OptionInfo, config_of
from quire.scheduler.schedule_config import ScheduleConfig

_CONFIGS = {"kv": KVConfig, "schedule": ScheduleConfig}
_NOT_OPTIONS = ("self", "model", *_CONFIGS)
_Path = tuple[str, ...]
"""Names of the configs that hold an option, then of its field."""


def llm_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments of `LLM` from options by their flat names.

    Raises:
        UnknownName: there is no such option.
        ConfigError: a value is invalid.
    """
    places = _places()
    values: dict[tuple[str, ...], object] = {}
    for name, value in given.items():
        if name not in places:
            raise UnknownName("option of the engine", name, places)
        values[places[name]] = value
    built = {name: _build(config, (name,), values) for name, config in _CONFIGS.items()}
    return {path[0]: value for path, value in values.items() if len(path) == 1} | built


def _places() -> dict[str, _Path]:
    own = inspect.signature(LLM.__init__).parameters
    found: dict[str, _Path] = {name: (name,) for name in own if name not in _NOT_OPTIONS}
    for name, config in _CONFIGS.items():
        found |= _fields_of(config, (name,))
    return found


def _fields_of(config: Any, path: tuple[str, ...]) -> dict[str, _Path]:
    """The options of a config and of its nested configs, also by their synonyms."""
    found: dict[str, _Path] = {}
    for field in fields(config):
        where, held = (*path, field.name), config_of(field.type)
        if held is not None:
            found |= _fields_of(held, where)
            continue
        info = field.metadata.get("option", OptionInfo())
        for flag in (info.flag or field.name, *info.synonyms):
            found[flag.replace("-", "_")] = where
    return found


def _build(config: Any, path: tuple[str, ...], values: Mapping[tuple[str, ...], object]) -> Any:
    made: dict[str, object] = {}
    for field in fields(config):
        where, held = (*path, field.name), config_of(field.type)
        if held is not None:
            made[field.name] = _build(held, where, values)
        elif where in values:
            made[field.name] = values[where]
    return config(**made)
