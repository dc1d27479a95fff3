"""Splits offloaded prefixes into recomputed, transferred and CPU-attended pages.

The split follows measured rates or the user's fractions. Rates are measured at the start and
updated from every copy and product of every step (see `quire.offload.profiler`). The split moves
only if that gains time (`quire.offload.control`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.kv.step_log import Timed
from quire.offload.control import SplitController
from quire.offload.kv.step_planner import StepPlanner
from quire.offload.profiler import OffloadProfiler, Sizes
from quire.offload.schedule.work import BatchTokens
from quire.offload.split import OffloadRates, best_shares, share_rows
from quire.offload.timeline import LANES, Operation, Schedule, Span, TaskKind, Timeline

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


_MIN_MOVE = 0.1  # smallest change of the CPU attention share, as a fraction of all tokens


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
        profiler: provides and learns the rates.
        sizes: bytes that cross the link.
        page_tokens: tokens of a page.
        requested: fractions that rates do not choose, and limits.
        planner: predicts the steps of a split; None: the formulas alone decide.

    Attributes:
        recomputed_tokens, host_tokens, tokens: recomputed tokens, CPU attention tokens and all
            tokens of one layer in the last batch with offloaded KV.
        controller: controls the recompute split.
    """

    def __init__(
        self,
        profiler: OffloadProfiler,
        sizes: Sizes,
        *,
        page_tokens: int,
        requested: SplitLimits,
        planner: StepPlanner | None = None,
    ) -> None:
        self.profiler, self.planner = profiler, planner
        self.controller = SplitController(unit=page_tokens)
        self.recomputed_tokens = self.host_tokens = self.tokens = 0
        self._sizes, self._page_tokens, self._requested = sizes, page_tokens, requested
        self._host_fraction: float | None = None
        self._rows, self._batches = 0, 1

    def divide(
        self, prefixes: Mapping[int, OffloadedPrefix], rows: int, batches: int = 1
    ) -> dict[int, Share]:
        tokens = self.tokens = sum(f.columns for f in prefixes.values()) * self._page_tokens
        self._rows, self._batches = rows, batches
        rates = self._rates()
        host = self._host_tokens(rates, tokens)
        most = self._requested.max_recomputed // batches  # each batch has its own staging of X
        recomputed = min(self._recompute_tokens(rates, tokens - host), most)
        shares = divide_prefixes(prefixes, recomputed, host, self._page_tokens)
        self.recomputed_tokens = sum(len(s.recomputed) for s in shares.values()) * self._page_tokens
        self.host_tokens = sum(len(s.host) for s in shares.values()) * self._page_tokens
        return shares

    def order(self, batches: Sequence[BatchTokens]) -> Mapping[tuple[int, int], int]:
        return {} if self.planner is None else self.planner.order(batches)

    def learn(self, timed: Sequence[Timed]) -> None:
        timeline = timeline_of(timed)
        self.profiler.observe(timeline)
        if self._requested.recomputed is None:
            rates = self._rates()  # includes this step's update
            self.controller.observe(timeline, rates, self.tokens - self.host_tokens)

    def _rates(self) -> OffloadRates:
        speeds = self.profiler.speeds
        return speeds.rates_with_weights(
            self._sizes, rows=self._rows, tokens=self.tokens, batches=self._batches
        )

    def _recompute_tokens(self, rates: OffloadRates, tokens: int) -> int:
        if self._requested.recomputed is None:
            wanted = self.controller.split(rates, tokens)
            if not wanted or self.planner is None:
                return wanted
            batch = BatchTokens(rows=self._rows, kv=tokens, host=self.tokens - tokens)
            speeds = self.profiler.speeds
            return self.planner.choose(speeds, batch, (wanted, 0), self._batches)
        return round(self._requested.recomputed * self.tokens)

    def _host_tokens(self, rates: OffloadRates, tokens: int) -> int:
        """Tokens to attend to on the CPU; unchanged while the best share is near the last one."""
        if self._requested.host is not None:
            return round(self._requested.host * tokens)
        if not self._requested.max_recomputed:
            rates = replace(rates, x_s=rates.kv_s)  # nothing can be recomputed
        best = best_shares(rates, tokens).host_tokens / tokens if tokens else 0.0
        if self._host_fraction is None or abs(best - self._host_fraction) > _MIN_MOVE:
            self._host_fraction = best
        return round(self._host_fraction * tokens)


def timeline_of(timed: Sequence[Timed]) -> Timeline:
    """Convert the log of a step to a timeline."""
    ordered = sorted(timed, key=lambda item: item.start_s)
    operations = tuple(
        Operation(
            index=index,
            kind=(kind := TaskKind(item.kind)),
            lane=LANES[kind],
            layer=item.layer,
            tokens=item.tokens,
            num_bytes=item.num_bytes,
        )
        for index, item in enumerate(ordered)
    )
    spans = tuple(
        Span(operation, item.start_s, max(item.start_s, item.end_s))
        for operation, item in zip(operations, ordered, strict=True)
    )
    return Timeline(Schedule(operations), spans)
