"""The registry `docs/claims.toml`: sentences with figures, and where each figure was measured."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from quire.errors import ConfigError

Combine: TypeAlias = Literal["value", "sum", "inverse", "ratio", "max", "min"]
"""How the values at the keys become the figure; inverse: 1 / their sum; ratio: first / second."""

FIGURE = "{}"  # stands for a figure in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a sentence.

    Attributes:
        keys: paths in the stored result, with `/` between names and indexes; for the results log,
            sentences of the log with `{}` for the figure.
        combine: how the values become one.
        scale: factor to the unit of the sentence, such as 1e-6 from bytes to MB.
        tolerance: largest difference in the unit of the sentence; None: half a unit of the last
            digit that the sentence states.
    """

    keys: tuple[str, ...]
    combine: Combine = "value"
    scale: float = 1.0
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickForm:
    """A command that measures figures again on any machine; its last line is one JSON object.

    Attributes:
        name: name in the registry.
        command: program and arguments; `python` is the running interpreter.
        duration_s: seconds on two quiet cores.
    """

    name: str
    command: tuple[str, ...]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence or table row of a document with measured figures.

    Attributes:
        name: name in the registry.
        document: path of the document from the root of the checkout.
        sentence: text with `{}` for each figure; it occurs once in the document.
        stored: path of the stored result: a JSON file, or the results log.
        figures: one for each `{}`.
        script: path of the script that measures the figures in full.
        quick: form that measures them again; None: the full measurement only.
        quick_tolerance: as `Figure.tolerance`, for the quick form.
    """

    name: str
    document: str
    sentence: str
    stored: str
    figures: tuple[Figure, ...]
    script: str
    quick: QuickForm | None = None
    quick_tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """All claims, and what the scan for figures skips.

    Attributes:
        claims: claims in the order of the file.
        documents: scanned documents, paths or patterns of `Path.glob`.
        exempt: by document, texts whose figures are not measured, with the reason.
    """

    claims: tuple[Claim, ...]
    documents: tuple[str, ...]
    exempt: Mapping[str, Mapping[str, str]]


def read_registry(path: Path) -> Registry:
    """Read and check the registry.

    Raises:
        ConfigError: the file is not TOML, or an entry has an unknown, missing or wrong field.
    """
    try:
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"expected TOML in {path.name}, got: {error}") from error
    quick = {name: _quick_form(name, given) for name, given in listed.get("quick", {}).items()}
    return Registry(
        claims=tuple(_claim(name, given, quick) for name, given in listed.get("claim", {}).items()),
        documents=tuple(listed.get("documents", ())),
        exempt=listed.get("exempt", {}),
    )


def _quick_form(name: str, given: Mapping[str, Any]) -> QuickForm:
    where = f"quick.{name}"
    _check_fields(where, given, required=("command", "duration_s"))
    return QuickForm(name=name, command=tuple(given["command"]), duration_s=given["duration_s"])


def _claim(name: str, given: Mapping[str, Any], quick: Mapping[str, QuickForm]) -> Claim:
    where = f"claim.{name}"
    required = ("document", "sentence", "stored", "figures", "script")
    _check_fields(where, given, required, optional=("quick", "quick_tolerance"))
    figures = tuple(_figure(where, found) for found in given["figures"])
    count = given["sentence"].count(FIGURE)
    if count != len(figures) or not figures:
        raise ConfigError(
            f"{where}: expected one entry of figures for each {FIGURE} of the sentence, "
            f"got {len(figures)} for {count}"
        )
    form = given.get("quick")
    if form is not None and form not in quick:
        raise ConfigError(f"{where}: expected a quick form of {sorted(quick)}, got {form!r}")
    fields = {key: given[key] for key in ("document", "sentence", "stored", "script")}
    return Claim(
        name=name,
        figures=figures,
        quick=None if form is None else quick[form],
        quick_tolerance=given.get("quick_tolerance"),
        **fields,
    )


def _figure(where: str, given: str | Mapping[str, Any]) -> Figure:
    if isinstance(given, str):
        return Figure(keys=(given,))
    where = f"{where}.figures"
    _check_fields(where, given, required=("keys",), optional=("combine", "scale", "tolerance"))
    combine, keys = given.get("combine", "value"), tuple(given["keys"])
    if combine not in get_args(Combine):
        raise ConfigError(f"{where}: expected combine of {get_args(Combine)}, got {combine!r}")
    wanted = {"value": 1, "ratio": 2}.get(combine, len(keys))
    if not keys or len(keys) != wanted:
        raise ConfigError(f"{where}: {combine} got {len(keys)} keys")
    return Figure(**{**given, "keys": keys})


def _check_fields(
    where: str, given: Mapping[str, Any], required: Sequence[str], optional: Sequence[str] = ()
) -> None:
    missing = [field for field in required if field not in given]
    unknown = [field for field in given if field not in (*required, *optional)]
    if missing or unknown:
        raise ConfigError(
            f"{where}: expected the fields {', '.join((*required, *optional))}; "
            f"missing: {missing}, unknown: {unknown}"
        )
