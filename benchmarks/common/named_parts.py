"""A bench in parts that have names: which of them run, and how long each takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from benchmarks.common.result import PartResult
from quire.errors import ConfigError, UnknownName

Config = TypeVar("Config")


def names_of(text: str, known: Mapping[str, object], what: str = "part") -> tuple[str, ...]:
    """Read names written with commas, in the order of `known`; "" for all.

    Args:
        text: what was asked for.
        known: by name, in the order in which they run.
        what: a name stands for, for errors.

    Raises:
        UnknownName: nothing has this name.
        ConfigError: one is named twice.
    """
    if not text.strip():
        return tuple(known)
    requested = [name.strip() for name in text.split(",")]
    for name in requested:
        if name not in known:
            raise UnknownName(what, name, known)
    if len(set(requested)) != len(requested):
        raise ConfigError(f"expected each {what} once, got {text!r}")
    return tuple(name for name in known if name in requested)


def run_named(
    names: Sequence[str], parts: Mapping[str, Callable[[Config], PartResult]], config: Config
) -> Iterator[tuple[str, PartResult]]:
    """Run parts one after the other; yield each when it is done.

    Args:
        names: of `parts`.
        parts: by name.
        config: of all of them.
    """
    for name in names:
        started_s = perf_counter()
        result = parts[name](config)
        yield name, replace(result, seconds=perf_counter() - started_s)
