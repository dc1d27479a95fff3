"""Find the sentence of a claim in a document, and the figures that it states."""

import re
from dataclasses import dataclass

from benchmarks.claims.registry import FIGURE
from quire.errors import ConfigError

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Stated:
    """A figure as a document states it.

    Attributes:
        text: digits of the figure, with separators of thousands.
        start, end: its offsets in the document.
    """

    text: str
    start: int
    end: int

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.replace(",", ""))

    @property
    def half_unit(self) -> float:
        """Half a unit of the last digit: the largest error of a correctly rounded figure."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])

    def agrees(self, measured: float, tolerance: float | None = None) -> bool:
        """Whether a measured value rounds to the figure, or is within the tolerance."""
        bound = self.half_unit if tolerance is None else tolerance
        return abs(measured - self.value) <= bound + 1e-9 * max(1.0, abs(measured))


def pattern(sentence: str) -> re.Pattern[str]:
    """Regular expression of a sentence; a space in it may be a line break."""
    texts = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in sentence.split(FIGURE))
    return re.compile(f"(?<!\\w){f'({NUMBER})'.join(texts)}(?![\\w.,]?\\d)")


def stated_figures(text: str, sentence: str) -> tuple[Stated, ...]:
    """The figures of a sentence that occurs once in a text.

    Raises:
        ConfigError: the sentence does not occur, or occurs more than once.
    """
    found = list(pattern(sentence).finditer(text))
    if len(found) != 1:
        raise ConfigError(f"expected the sentence once, found it {len(found)} times: {sentence!r}")
    [match] = found
    spans = (match.span(group) for group in range(1, sentence.count(FIGURE) + 1))
    return tuple(Stated(text[start:end], start, end) for start, end in spans)
