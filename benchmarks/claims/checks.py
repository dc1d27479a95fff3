"""Compare the figures of documents with stored results and with quick forms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.claims.measured import Lookup, lookup_in, measured, number_at
from benchmarks.claims.quick import run_quick
from benchmarks.claims.registry import Claim, Figure, QuickForm
from benchmarks.claims.sentences import Stated, stated_figures
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        claim: name of the claim.
        document: path of the document.
        sentence: sentence of the claim.
        stated: figure in the document; "" if the sentence was not found.
        measured: measured value in the unit of the sentence; None if there is none.
        source: stored result, or command of the quick form.
        problem: why the figures could not be compared, or "".
        agrees: whether the document states the measured value.
    """

    claim: str
    document: str
    sentence: str
    stated: str = ""
    measured: float | None = None
    source: str
    problem: str = ""
    agrees: bool = False

    @property
    def text(self) -> str:
        """One line that names all that is needed to mend a disagreement."""
        found = self.problem or f"stated {self.stated}, measured {self.measured:.6g}"
        return f"{self.document}: {self.sentence!r} ({self.claim}): {found}; source: {self.source}"


def check_stored(claims: Sequence[Claim], root: Path) -> Iterator[Row]:
    """Compare each sentence with its stored result; a missing script is a problem too."""
    for claim in claims:
        if not (root / claim.script).is_file():
            problem = f"expected the script {claim.script}, it does not exist"
            yield _failed(claim, claim.stored, problem)
        try:
            lookup = lookup_in(root / claim.stored)
        except ConfigError as error:
            yield _failed(claim, claim.stored, str(error))
            continue
        yield from _compare(claim, root, lookup, claim.stored)


def check_quick(form: QuickForm, claims: Sequence[Claim], root: Path) -> Iterator[Row]:
    """Run a quick form, and compare the sentences of its claims with the output."""
    source = " ".join(form.command)
    try:
        result = run_quick(form, root)
    except ConfigError as error:
        yield from (_failed(claim, source, str(error)) for claim in claims)
        return
    for claim in claims:
        yield from _compare(claim, root, lambda key: number_at(result, key), source, quick=True)


def _compare(
    claim: Claim, root: Path, lookup: Lookup, source: str, *, quick: bool = False
) -> Iterator[Row]:
    try:
        text = (root / claim.document).read_text(encoding="utf-8")
        stated = stated_figures(text, claim.sentence)
    except (OSError, ConfigError) as error:
        yield _failed(claim, source, str(error))
        return
    tolerance = claim.quick_tolerance if quick else None
    for figure, found in zip_longest(claim.figures, stated):
        yield _row(claim, figure, found, lookup, source, tolerance)


def _row(
    claim: Claim,
    figure: Figure,
    found: Stated,
    lookup: Lookup,
    source: str,
    tolerance: float | None,
) -> Row:
    try:
        value = measured(figure, lookup)
    except ConfigError as error:
        return _failed(claim, source, str(error), found.text)
    bound = figure.tolerance if tolerance is None else tolerance
    return Row(
        claim=claim.name,
        document=claim.document,
        sentence=claim.sentence,
        stated=found.text,
        measured=value,
        source=source,
        agrees=found.agrees(value, bound),
    )


def _failed(claim: Claim, source: str, problem: str, stated: str = "") -> Row:
    return Row(
        claim=claim.name,
        document=claim.document,
        sentence=claim.sentence,
        stated=stated,
        source=source,
        problem=problem,
    )
