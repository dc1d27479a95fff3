"""Which pages of a front are made again, which are carried, which are attended to on the host.

    columns   | carried (no X) | made again from X | carried | attended to on the host |
              0                made.start          made.stop host.start                staged

Pages of all layers and lanes of a sequence alike; only sums cost, so sequences get equal shares of
what they have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quire.plan.offload.split import share_rows


@dataclass(frozen=True, slots=True)
class OffloadedPrefix:
    """A sequence's front in one step.

    Attributes:
        columns: pages of a lane on the host.
        known: those of them whose inputs (X) are kept.
        on_host: whether some may be attended to on the host.
    """

    columns: int
    known: range = range(0)
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What becomes of a front's columns; those in neither range are carried."""

    made: range = range(0)
    host: range = range(0)

    def transferred(self, first: int, stop: int) -> Iterator[range]:
        """Runs of columns from `first` to `stop` that the link carries as they are."""
        start = first
        for taken in sorted((self.made, self.host), key=lambda columns: columns.start):
            if taken:
                if start < min(taken.start, stop):
                    yield range(start, min(taken.start, stop))
                start = max(start, taken.stop)
        if start < stop:
            yield range(start, stop)


CARRIED = Share()
"""All of it is carried."""


def divide_prefixes(
    fronts: Mapping[int, OffloadedPrefix], made_tokens: int, host_tokens: int, page_tokens: int
) -> dict[int, Share]:
    """Divide tokens over sequences, in whole pages.

    Args:
        fronts: by sequence.
        made_tokens: to make again, of all sequences together; as many as inputs are kept of.
        host_tokens: to attend to on the host; of these, as many as are left.
        page_tokens: of a page.
    """
    rows = list(fronts)
    known = tuple(len(front.known) * page_tokens for front in fronts.values())
    made = share_rows(known, min(made_tokens, sum(known)), page_tokens)
    left = tuple(
        max(0, front.columns - _made(front, n // page_tokens).stop) * page_tokens * front.on_host
        for front, n in zip(fronts.values(), made, strict=True)
    )
    host = share_rows(left, min(host_tokens, sum(left)), page_tokens)
    return {
        row: Share(
            made=_made(fronts[row], n // page_tokens),
            host=range(fronts[row].columns - a // page_tokens, fronts[row].columns),
        )
        for row, n, a in zip(rows, made, host, strict=True)
    }


def _made(front: OffloadedPrefix, columns: int) -> range:
    return range(front.known.start, front.known.start + columns) if columns else range(0)
