"""Splits offloaded prefixes into recomputed, transferred and CPU-attended pages.

The split follows measured rates or the user's fractions (`quire.offload.split`), and moves only if
that gains time: what is loaded ahead for the next step has the split of this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.offload.split import (
    MeasuredRates,
    OffloadRates,
    embedded_step_seconds,
    host_split,
    pipelined_split,
    share_rows,
)
from quire.offload.step_log import Timed

# Pages of an offloaded prefix that are recomputed, transferred, or attended to on the CPU:
#
#     columns   | transferred (no X) | recomputed from X | transferred    | CPU attention |
#               0                    recomputed.start    recomputed.stop  host.start    staged
#
# The split is the same in all layers and lanes of a sequence. Only the total costs time, so all
# sequences get the same fraction of the pages that qualify.


@dataclass(frozen=True, slots=True)
class OffloadedPrefix:
    """The offloaded prefix of a sequence in one step.

    Attributes:
        columns: offloaded pages of a lane.
        known: those of them with stored activations (X).
        on_host: whether CPU attention may serve some of them.
    """

    columns: int
    known: range = range(0)
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """Split of the columns of an offloaded prefix; columns in neither range are transferred."""

    recomputed: range = range(0)
    host: range = range(0)

    def transferred(self, first: int, stop: int) -> Iterator[range]:
        """Runs of columns from `first` to `stop` that are transferred."""
        start = first
        for taken in sorted((self.recomputed, self.host), key=lambda columns: columns.start):
            if taken:
                if start < min(taken.start, stop):
                    yield range(start, min(taken.start, stop))
                start = max(start, taken.stop)
        if start < stop:
            yield range(start, stop)


TRANSFERRED = Share()
"""All columns are transferred."""


def divide_prefixes(
    prefixes: Mapping[int, OffloadedPrefix],
    recomputed_tokens: int,
    host_tokens: int,
    page_tokens: int,
) -> dict[int, Share]:
    """Divide tokens over sequences, in whole pages.

    Args:
        prefixes: offloaded prefixes by sequence.
        recomputed_tokens: tokens to recompute in all sequences; limited by stored activations.
        host_tokens: tokens to attend to on the CPU; limited to those not recomputed.
        page_tokens: tokens of a page.
    """
    rows = list(prefixes)
    known = tuple(len(prefix.known) * page_tokens for prefix in prefixes.values())
    recomputed = share_rows(known, min(recomputed_tokens, sum(known)), page_tokens)
    left = tuple(
        max(0, prefix.columns - _recomputed(prefix, n // page_tokens).stop)
        * page_tokens
        * prefix.on_host
        for prefix, n in zip(prefixes.values(), recomputed, strict=True)
    )
    host = share_rows(left, min(host_tokens, sum(left)), page_tokens)
    return {
        row: Share(
            recomputed=_recomputed(prefixes[row], n // page_tokens),
            host=range(prefixes[row].columns - a // page_tokens, prefixes[row].columns),
        )
        for row, n, a in zip(rows, recomputed, host, strict=True)
    }


def _recomputed(prefix: OffloadedPrefix, columns: int) -> range:
    return range(prefix.known.start, prefix.known.start + columns) if columns else range(0)


_MIN_GAIN = 0.01  # smallest gain that moves the recompute split, as a fraction of a step
_MIN_MOVE = 0.1  # smallest change of the CPU attention share, as a fraction of all tokens
_CHUNKS = 4  # copies of X of a layer, about


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """Limits set by the user or the model.

    Attributes:
        recomputed: fraction (0 to 1) of all tokens to recompute; None: chosen by rates.
        max_recomputed: most recomputed tokens of one layer, which scratch memory limits.
        host: fraction (0 to 1) of tokens to attend to on the CPU; None: chosen by rates.
    """

    recomputed: float | None = None
    max_recomputed: int = 0
    host: float | None = 0.0


class PrefixSplits:
    """Splits the offloaded prefixes of each step.

    Args:
        rates: provides and learns the rates.
        page_tokens: tokens of a page.
        num_layers: layers with offloaded KV.
        requested: fractions that rates do not choose, and limits.

    Attributes:
        recomputed_tokens, host_tokens, tokens: recomputed tokens, CPU attention tokens and all
            tokens of one layer in the last batch with offloaded KV.
    """

    def __init__(
        self, rates: MeasuredRates, *, page_tokens: int, num_layers: int, requested: SplitLimits
    ) -> None:
        self.rates = rates
        self.recomputed_tokens = self.host_tokens = self.tokens = 0
        self._page_tokens, self._num_layers, self._requested = page_tokens, num_layers, requested
        self._recomputed_fraction: float | None = None
        self._host_fraction: float | None = None

    def divide(
        self, prefixes: Mapping[int, OffloadedPrefix], rows: int, batches: int = 1
    ) -> dict[int, Share]:
        """Split of each offloaded prefix of a batch, by row.

        Args:
            prefixes: offloaded prefixes by row.
            rows: rows of the batch.
            batches: batches of the step, which share each layer.
        """
        tokens = self.tokens = sum(f.columns for f in prefixes.values()) * self._page_tokens
        host = self._host_tokens(tokens, batches)
        most = self._requested.max_recomputed // batches  # each batch has its own staging of X
        recomputed = min(self._recomputed(tokens - host, batches), most)
        shares = divide_prefixes(prefixes, recomputed, host, self._page_tokens)
        self.recomputed_tokens = sum(len(s.recomputed) for s in shares.values()) * self._page_tokens
        self.host_tokens = sum(len(s.host) for s in shares.values()) * self._page_tokens
        return shares

    def learn(self, timed: Sequence[Timed]) -> None:
        self.rates.learn(timed)

    def _recomputed(self, tokens: int, batches: int) -> int:
        """Tokens to recompute: as before, unless another split or none makes the step faster."""
        if self._requested.recomputed is not None:
            return round(self._requested.recomputed * self.tokens)
        if not tokens:
            return 0
        plain, chunked = (
            self.rates.layer(self.tokens, batches=batches, chunks=chunks) for chunks in (0, _CHUNKS)
        )

        def seconds(recomputed: int) -> float:
            rates: OffloadRates = chunked if recomputed else plain
            return embedded_step_seconds(rates, tokens, recomputed, self._num_layers)

        best = min(0, pipelined_split(chunked, tokens, self._page_tokens), key=seconds)
        if self._recomputed_fraction is not None:
            pages = round(self._recomputed_fraction * tokens / self._page_tokens)
            held = pages * self._page_tokens
            if seconds(held) <= (1 + _MIN_GAIN) * seconds(best):
                return held
        self._recomputed_fraction = best / tokens
        return best

    def _host_tokens(self, tokens: int, batches: int) -> int:
        """Tokens to attend to on the CPU; unchanged while the best share is near the last one."""
        if self._requested.host is not None:
            return round(self._requested.host * tokens)
        rates = self.rates.layer(self.tokens, batches=batches)
        if not self._requested.max_recomputed:
            rates = replace(rates, x_s=rates.kv_s)  # nothing can be recomputed
        best = host_split(rates, tokens, self._page_tokens) / tokens if tokens else 0.0
        if self._host_fraction is None or abs(best - self._host_fraction) > _MIN_MOVE:
            self._host_fraction = best
        return round(self._host_fraction * tokens)
