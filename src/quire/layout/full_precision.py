"""Tokens that are kept as the model made them, beside pages that hold them in codes.

A sequence has some records of its own in each lane:

    record    0 .. sinks - 1             the tokens at these positions
              sinks + (p - sinks) % recent   the newest tokens, each at its position p

A query at position t attends to them in place of their codes where a position p is below `sinks`,
or is one of the newest, p > t - residual, or where its page is encoded as a whole and was not full
when the query came. So it does not matter how a prompt is cut into chunks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecisionTokens:
    """Which tokens are kept, and which of them are attended.

    Attributes:
        of: name of the group whose tokens they are: same lanes.
        sinks: first tokens.
        residual: newest tokens that are attended as they were made, the query's own included.
        recent: newest tokens that are kept; at least `residual`.
        page_tokens: of the pages that are encoded as a whole; 1 where each token is by itself.
    """

    of: str
    sinks: int
    residual: int
    recent: int
    page_tokens: int = 1

    @property
    def records(self) -> int:
        """Tokens of a lane."""
        return self.sinks + self.recent
