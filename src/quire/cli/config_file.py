"""The TOML file of `--config`: options by the names of their flags, flat or in tables.

model = "quire-tiny"
kv-memory = "64MiB"        # flat: the name of the flag

[kv]
codec = "none"             # in a table: the name of the flag or of the field

[kv.offload]
kv_memory = "1GiB"         # in a nested table: the same

A table [model] contains the model as `name`, because TOML refuses duplicate keys.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.cli.options import SECTIONS, OptionField, options_of
from quire.errors import ConfigError, UnknownName
from quire.layout.values import read_toml

MODEL_KEY = "model"
_NAME_KEY = "name"


def read_config_file(path: Path) -> tuple[str | None, dict[str, object]]:
    """Read a file of options.

    Returns:
        The model of the file, or None; and the values by `OptionField.parameter`.

    Raises:
        ConfigError: no such file, not TOML, a value of the wrong type, or a duplicate option.
        UnknownName: an unknown option; suggests the most similar names.
    """
    content = read_toml(path, "config file")
    model: str | None = None
    values: dict[str, object] = {}
    tables = {section.name: tuple(section.options()) for section in SECTIONS}
    for key, value in content.items():
        if key == MODEL_KEY and not isinstance(value, Mapping):
            model = _model_name(path, MODEL_KEY, value)
        elif key in tables and isinstance(value, Mapping):
            inner = dict(value)
            if key == MODEL_KEY and _NAME_KEY in inner:
                model = _model_name(path, "model.name", inner.pop(_NAME_KEY))
            _read_table(values, path, tables[key], (key,), inner)
        else:
            _put(values, path, _find_flat(key, path), value)
    return model, values


def _read_table(
    values: dict[str, object],
    path: Path,
    options: Sequence[OptionField],
    names: tuple[str, ...],
    table: Mapping[str, object],
) -> None:
    """Read a table and its sub-tables: [kv.offload] has the fields of `KVConfig.offload`."""
    inside = [found for found in options if found.path[: len(names) - 1] == names[1:]]
    inner_tables = {found.path[len(names) - 1] for found in inside if len(found.path) > len(names)}
    for name, value in table.items():
        if _underscored(name) in inner_tables and isinstance(value, Mapping):
            _read_table(values, path, options, (*names, _underscored(name)), value)
        else:
            known = {_underscored(found.flag): found for found in inside}
            known |= {found.name: found for found in inside if len(found.path) == len(names)}
            kind = f"option of [{'.'.join(names)}] in {path}"
            if _underscored(name) not in known:
                raise UnknownName(kind, name, {*known, *inner_tables})
            _put(values, path, known[_underscored(name)], value)


def _model_name(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key!r} must be a string, got {value!r}")
    return value


def _find_flat(name: str, path: Path) -> OptionField:
    known = {_underscored(found.flag): found for found in options_of(SECTIONS)}
    if _underscored(name) not in known:
        tables = [section.name for section in SECTIONS]
        raise UnknownName(f"option in {path}", name, [*known, *tables])
    return known[_underscored(name)]


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _put(values: dict[str, object], path: Path, found: OptionField, value: object) -> None:
    if found.parameter in values:
        raise ConfigError(f"{path} sets {found.flag!r} twice; leave one out")
    values[found.parameter] = _checked(path, found, value)


_EXPECTED: Mapping[object, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def _checked(path: Path, found: OptionField, value: object) -> object:
    expected = _EXPECTED.get(found.kind, "a string or a list of strings")
    if found.sized:
        expected = "a number of bytes or a size such as '64MiB'"
    if not _fits(found, value):
        raise ConfigError(f"{path}: {found.flag!r} must be {expected}, got {value!r}")
    # convert to text, as a flag is, so that a small number without a unit is refused
    return str(value) if found.sized and value in range(1, 1024) else value


def _fits(found: OptionField, value: object) -> bool:
    if isinstance(value, bool) or found.kind is bool:
        return isinstance(value, bool) and found.kind is bool
    if found.sized:
        return isinstance(value, int | str)
    if found.kind is float:
        return isinstance(value, int | float)
    if found.kind is int:
        return isinstance(value, int)
    if found.kind is str:
        return isinstance(value, str)
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts)
