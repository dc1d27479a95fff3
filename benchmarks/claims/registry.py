"""The registry `docs/claims.toml`: sentences with figures, and where each figure was measured.

A sentence is found in its document with the figures that it states. The scan finds figures of a
measured kind that no claim and no exemption covers. It is conservative: a number with a unit of
time, bytes, rate or ratio in prose, and a number with two decimals anywhere. Code, tested output,
generated parts, versions and defaults of options are skipped.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from quire.errors import ConfigError

Combine: TypeAlias = Literal["value", "sum", "inverse", "ratio", "max", "min"]
"""How the values at the keys become the figure; inverse: 1 / their sum; ratio: first / second."""

Span: TypeAlias = tuple[int, int]

FIGURE = "{}"  # stands for a figure in a sentence


class _Entry(BaseModel):
    """An entry of the file: no other fields, and values of the declared types."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Entry):
    """One figure of a sentence."""

    # paths in the stored result, names and indexes with `/` between them, or sentences of the log
    keys: tuple[str, ...] = Field(min_length=1)
    combine: Combine = "value"
    scale: float = 1.0  # factor to the unit of the sentence, such as 1e-6 from bytes to MB

    @model_validator(mode="after")
    def _has_as_many_keys_as_combined(self) -> "Figure":
        wanted = {"value": 1, "ratio": 2}.get(self.combine, len(self.keys))
        if len(self.keys) != wanted:
            raise ValueError(f"{self.combine} got {len(self.keys)} keys")
        return self


class QuickForm(_Entry):
    """A command that measures figures again on any machine; its last line is one JSON object."""

    command: tuple[str, ...]  # `python` is the running interpreter
    duration_s: float  # on two quiet cores


class Claim(_Entry):
    """A sentence or table row of a document with measured figures; paths are from the checkout."""

    name: str
    document: str
    sentence: str  # text with `{}` for each figure; it occurs once in the document
    stored: str  # a JSON file, or the results log
    figures: tuple[  # one for each `{}`; a text stands for its key
        Annotated[
            Figure, BeforeValidator(lambda one: {"keys": [one]} if isinstance(one, str) else one)
        ],
        ...,
    ] = Field(min_length=1)
    script: str  # measures the figures in full
    quick: str | None = None  # form that measures them again

    @model_validator(mode="after")
    def _has_a_figure_for_each_mark(self) -> "Claim":
        count = self.sentence.count(FIGURE)
        if count != len(self.figures):
            raise ValueError(
                f"expected one entry of figures for each {FIGURE} of the sentence, "
                f"got {len(self.figures)} for {count}"
            )
        return self


class Registry(_Entry):
    """All claims and quick forms by name, and what the scan for figures skips."""

    claim: dict[str, Claim] = {}
    quick: dict[str, QuickForm] = {}
    documents: tuple[str, ...] = ()  # scanned: paths or patterns of `Path.glob`
    exempt: dict[str, dict[str, str]] = {}  # by document: texts with the reason

    @model_validator(mode="after")
    def _has_the_named_quick_forms(self) -> "Registry":
        for claim in self.claims:
            if claim.quick not in (None, *self.quick):
                raise ValueError(
                    f"{claim.name}: expected a quick form of {sorted(self.quick)}, "
                    f"got {claim.quick!r}"
                )
        return self

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All claims."""
        return tuple(self.claim.values())


def read_registry(path: Path) -> Registry:
    """Read and check the registry.

    Raises:
        ConfigError: the file is not TOML, or an entry has an unknown, missing or wrong field.
    """
    try:
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, given in listed.get("claim", {}).items():
            given.setdefault("name", name)
        return Registry(**listed)
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"expected the entries of claims in {path.name}, got: {error}") from error


NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Stated:
    """A figure as a document states it, and its offsets in the document."""

    text: str  # digits, with separators of thousands
    start: int
    end: int

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.replace(",", ""))

    def agrees(self, measured: float) -> bool:
        """Whether a measured value rounds to the figure: half a unit of its last digit."""
        half_unit = 0.5 * 10.0 ** -len(self.text.partition(".")[2])
        return abs(measured - self.value) <= half_unit + 1e-9 * max(1.0, abs(measured))


def stated_figures(text: str, sentence: str) -> tuple[Stated, ...]:
    """The figures of a sentence that occurs once in a text.

    Raises:
        ConfigError: the sentence does not occur, or occurs more than once.
    """
    # a space of the sentence may be a line break of the text
    texts = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in sentence.split(FIGURE))
    pattern = f"(?<!\\w){f'({NUMBER})'.join(texts)}(?![\\w.,]?\\d)"
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ConfigError(f"expected the sentence once, found it {len(found)} times: {sentence!r}")
    [match] = found
    spans = (match.span(group) for group in range(1, sentence.count(FIGURE) + 1))
    return tuple(Stated(text[start:end], start, end) for start, end in spans)


_UNITS = (
    r"x|times|%|percent|points|nats|[uµ]s|ms|s|seconds|min|minutes|hours|bytes|B|[kKMGT]i?B|"
    r"[kKMGT]i?B/s|[GT]FLOP/s|tokens/s|requests/s|of the (?:time|bytes|memory|tokens)"
)
_PROSE = re.compile(rf"(?<![\w.,/-])({NUMBER})(?:[ -]|\s)?(?:{_UNITS})(?![\w/-])")
_DECIMALS = re.compile(r"(?<![\w.,/-])([-+]?\d+\.\d{2,})(?!\w|\.\d)")
_SKIPPED = (
    re.compile(r"<!-- generated: [^>]*-->.*?<!-- end -->", re.DOTALL),
    re.compile(r"<!-- tested: [^>]*-->\n```\w+[^\n]*\n.*?```\n\n```text\n.*?```", re.DOTALL),
    re.compile(r"^ *```(?!text|console|\s)\w[^\n]*\n.*?^ *```$", re.DOTALL | re.MULTILINE),
    re.compile(r"^ *(?:\$ )?(?:quire|python|pip|serve run) [^\n]*$", re.MULTILINE),  # commands
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`\n]+`"),
    re.compile(r"\]\([^)\s]+\)"),
    re.compile(
        r"\b(?:Python|PyTorch|Transformers|Ray|Redis|Valkey)(?: before)? \d+\.[\d.]*\d"
        r"(?:,?(?: and| or)? \d+\.[\d.]*\d)*"
    ),  # versions
    re.compile(r"\(default:[^)]*\)"),
)


def scanned_documents(registry: Registry, root: Path) -> list[str]:
    """Paths of the scanned documents, in order."""
    paths = {path for pattern in registry.documents for path in root.glob(pattern)}
    return sorted(path.relative_to(root).as_posix() for path in paths)


def uncovered(registry: Registry, root: Path) -> Iterator[str]:
    """Lines, as `document:line: text`, with a figure that no claim states and no text exempts."""
    for document in scanned_documents(registry, root):
        text = (root / document).read_text(encoding="utf-8")
        covered = [
            span for exempt in registry.exempt.get(document, ()) for span in _spans_of(exempt, text)
        ]
        for claim in registry.claims:
            if claim.document == document:
                with suppress(ConfigError):  # a missing sentence covers nothing; the check names it
                    covered += [
                        (one.start, one.end) for one in stated_figures(text, claim.sentence)
                    ]
        for span in figure_spans(text):
            if not any(_contains(outer, span) for outer in covered):
                number = text.count("\n", 0, span[0]) + 1
                yield f"{document}:{number}: {text.splitlines()[number - 1].strip()}"


def unused_exemptions(registry: Registry, root: Path) -> list[str]:
    """Exemptions without a scanned document, or whose text has no figure there."""
    scanned, found = scanned_documents(registry, root), []
    for document, texts in registry.exempt.items():
        text = (root / document).read_text(encoding="utf-8") if document in scanned else ""
        figures = figure_spans(text)
        for exempt in texts:
            outer = _spans_of(exempt, text)
            if not any(_contains(span, figure) for span in outer for figure in figures):
                found.append(f"{document}: {exempt}")
    return found


def figure_spans(text: str) -> list[Span]:
    """Offsets of the figures of a measured kind in a document."""
    shown = text
    for skipped in _SKIPPED:  # replaced by `#`, so that offsets are those of the document
        shown = skipped.sub(lambda found: re.sub(r"[^\n]", "#", found[0]), shown)
    spans = {match.span(1) for match in _PROSE.finditer(shown)}
    spans |= {match.span(1) for match in _DECIMALS.finditer(shown)}
    return sorted(spans)


def _spans_of(exempt: str, text: str) -> list[Span]:
    """Where a text occurs; a space of it may be a line break."""
    return [one.span() for one in re.finditer(r"\s+".join(map(re.escape, exempt.split())), text)]


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
