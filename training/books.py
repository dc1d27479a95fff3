"""Books: plain ASCII text, with held-out documents for measurement."""

import lzma
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from training.config import DOCUMENT

_PLAIN: dict[str, str | int | None] = {
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{EM DASH}": "--",
    "\N{EN DASH}": "-",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{LATIN SMALL LETTER AE}": "ae",
    "\N{LATIN SMALL LIGATURE OE}": "oe",
    "\N{POUND SIGN}": "L",
}
_MIN_CHARACTERS = 2000
_UNMARKED_CHARACTERS = 40_000


@dataclass(frozen=True, slots=True)
class Books:
    """Training documents and held-out documents."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def to_ascii(text: str) -> str:
    """Convert quotes, dashes and accents to ASCII: others would waste a small vocabulary."""
    plain = text.translate(str.maketrans(_PLAIN))
    return unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode("ascii")


def split_documents(text: str) -> list[str]:
    """Split a text at `<|doc|>`; a text without this mark is split into equal parts."""
    if DOCUMENT not in text:
        starts = range(0, len(text), _UNMARKED_CHARACTERS)
        return [text[start : start + _UNMARKED_CHARACTERS] for start in starts]
    documents = (document.strip() for document in text.split(DOCUMENT))
    return [document for document in documents if len(document) > _MIN_CHARACTERS]


def hold_out(documents: list[str], count: int = 3) -> Books:
    """Hold out `count` documents, spread evenly over the list."""
    total = len(documents)
    held = {total * (2 * index + 1) // (2 * count) for index in range(count)}
    if total <= count:
        held = {total - 1}
    return Books(
        train=tuple(text for index, text in enumerate(documents) if index not in held),
        held_out=tuple(text for index, text in enumerate(documents) if index in held),
    )


def load_books(path: Path) -> Books:
    """Read a text file, plain or compressed with xz."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    text = data.decode("utf-8").replace("\r\n", "\n")
    return hold_out(split_documents(to_ascii(text)))
