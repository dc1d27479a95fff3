"""Find figures of a measured kind in documents, which a claim or an exemption must cover.

The scan is conservative: it finds a number with a unit of time, bytes, rate or ratio in prose, and
a number with two decimals anywhere. Code, tested output, generated parts, versions and defaults of
options are skipped.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims.registry import Registry
from benchmarks.claims.sentences import NUMBER, stated_figures
from quire.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A figure without claim and exemption.

    Attributes:
        document: path of the document.
        line: number of its line.
        text: the line.
    """

    document: str
    line: int
    text: str


def scanned_documents(registry: Registry, root: Path) -> list[str]:
    """Paths of the scanned documents, in order."""
    paths = {path for pattern in registry.documents for path in root.glob(pattern)}
    return sorted(path.relative_to(root).as_posix() for path in paths)


def uncovered(registry: Registry, root: Path) -> Iterator[Uncovered]:
    """Figures of the scanned documents that no claim states and no exemption contains."""
    for document in scanned_documents(registry, root):
        text = (root / document).read_text(encoding="utf-8")
        sentences = [claim.sentence for claim in registry.claims if claim.document == document]
        covered = [*_claimed(text, sentences), *_exempted(text, registry.exempt.get(document, {}))]
        for start, end in figure_spans(text):
            if not any(low <= start and end <= high for low, high in covered):
                number = text.count("\n", 0, start) + 1
                yield Uncovered(document, number, text.splitlines()[number - 1].strip())


def unused_exemptions(registry: Registry, root: Path) -> list[str]:
    """Exemptions without a scanned document, or whose text has no figure there."""
    scanned, found = scanned_documents(registry, root), []
    for document, texts in registry.exempt.items():
        known = document in scanned
        text = (root / document).read_text(encoding="utf-8") if known else ""
        spans = list(figure_spans(text))
        for exempt in texts:
            places = list(_exempted(text, {exempt: ""}))
            used = any(low <= a and b <= high for low, high in places for a, b in spans)
            found += [] if used else [f"{document}: {exempt}"]
    return found


def figure_spans(text: str) -> list[tuple[int, int]]:
    """Offsets of the figures of a measured kind in a document."""
    shown = _without_code(text)
    spans = {match.span(1) for match in _PROSE.finditer(shown)}
    spans |= {match.span(1) for match in _DECIMALS.finditer(shown)}
    return sorted(spans)


def _without_code(text: str) -> str:
    """The document with code replaced by `#`, so that offsets are those of the document."""
    for skipped in _SKIPPED:
        text = skipped.sub(lambda found: re.sub(r"[^\n]", "#", found[0]), text)
    return text


def _claimed(text: str, sentences: Sequence[str]) -> Iterator[tuple[int, int]]:
    for sentence in sentences:
        with suppress(ConfigError):  # a sentence that is missing covers nothing; the check names it
            for stated in stated_figures(text, sentence):
                yield stated.start, stated.end


def _exempted(text: str, exempt: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    for given in exempt:
        for match in re.finditer(r"\s+".join(map(re.escape, given.split())), text):
            yield match.span()
