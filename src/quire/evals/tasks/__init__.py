"""Seeded tasks whose answer is in the prompt or follows from it. One family per file.

`make("lines", seed, tokens, depth=0.25)` returns the same text on every machine and in every
version, so that published scores refer to exactly these prompts. This package does not need torch
or a model.
"""

import random
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from quire.errors import UnknownName
from quire.evals.tasks.base import (
    Measure,
    Setting,
    Span,
    Task,
    TaskFamily,
    TaskQuery,
    rough_measure,
)
from quire.evals.tasks.labels import Arithmetic, Copy, Headline, Labels, Quote
from quire.evals.tasks.needles import Facts, KeyValue, Lines, LongEval, Needles, Passkey
from quire.evals.tasks.redundant import Majority, Repeats, Retold, Topics
from quire.evals.tasks.ruler import CommonWords, MultiQuery, MultiValue, Variables, VariableTracking
from quire.evals.tasks.words import BookFiller, Filler, Split, synthetic_filler

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "BookFiller",
    "Filler",
    "Measure",
    "Setting",
    "Span",
    "Split",
    "Task",
    "TaskFamily",
    "TaskQuery",
    "build",
    "make",
    "names",
    "rough_measure",
    "synthetic_filler",
]

FAMILIES: Mapping[str, type[TaskFamily]] = MappingProxyType(
    {
        "lines": Lines,
        "longeval": LongEval,
        "kv": KeyValue,
        "niah": Needles,
        "facts": Facts,
        "copy": Copy,
        "headline": Headline,
        "variables": Variables,
        "labels": Labels,
        "arithmetic": Arithmetic,
    }
)
"""Families of quire-tiny's training data; their texts never change."""

ALL_FAMILIES: Mapping[str, type[TaskFamily]] = MappingProxyType(
    {
        **FAMILIES,
        "passkey": Passkey,
        "niah_multivalue": MultiValue,
        "niah_multiquery": MultiQuery,
        "tracking": VariableTracking,
        "cwe": CommonWords,
        "quote": Quote,
        "repeats": Repeats,
        "retold": Retold,
        "majority": Majority,
        "topics": Topics,
    }
)
"""Also the families that are used for evaluation only."""

_SETTINGS = frozenset(field.name for field in fields(Setting))


def names() -> tuple[str, ...]:
    """The families of the training data, in table order."""
    return tuple(FAMILIES)


def build(name: str, rng: random.Random, setting: Setting, **options: Any) -> Task:
    """Generate one task of a family from a random state.

    Args:
        name: a registered family.
        rng: the random state; it is advanced.
        setting: length, filler, split, number of questions, depth.
        options: fields of the family, such as `digits`.

    Returns:
        The task.
    """
    if name not in ALL_FAMILIES:
        raise UnknownName("task", name, ALL_FAMILIES)
    family = ALL_FAMILIES[name]
    # Every family is a dataclass; the abstract base has no fields and is not a dataclass.
    known = {field.name for field in fields(family)}  # type: ignore[arg-type]
    for option in options.keys() - known:
        raise UnknownName(f"option of task {name!r}", option, known | _SETTINGS)
    return family(**options).build(rng, setting)


def make(name: str, seed: int, tokens: int, **options: Any) -> Task:
    """Generate one task from its name and a seed.

    Args:
        name: a registered family, such as "lines".
        seed: equal seeds give equal tasks.
        tokens: target length of context and questions, in units of `measure`.
        options: fields of `Setting` (filler, measure, split, queries, depth) and of the family.

    Returns:
        The task; `task.prompt()` is the prompt, `task.queries[0].answer` the expected output.

    Raises:
        UnknownName: the family or option does not exist.
        ConfigError: an option is out of range.
    """
    shared = {key: value for key, value in options.items() if key in _SETTINGS}
    own = {key: value for key, value in options.items() if key not in _SETTINGS}
    setting = Setting(tokens=tokens, **shared)
    return build(name, random.Random(f"{name}/{seed}"), setting, **own)
