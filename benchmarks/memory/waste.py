"""Part `waste`: how much of the allocated KV memory holds no token, by store and workload.

Every store serves the same requests in the same bytes, with the engine's scheduler. Waste is
counted over time: slots without a token, over slots that running sequences hold.

In the baseline every sequence reserves a contiguous piece of one maximum length. Sequences, bytes,
order of arrival and scheduler are those of the paged run, with the store `contiguous_max`, and
waste means the same in both: allocated slots without a token, over allocated
slots, over time. Nothing is shared: a contiguous piece has one holder.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.config.kv_config import PrefixCacheConfig, StoreName
from quire.layout.model import ModelSpec
from quire.sim.run import SimConfig, make_simulator, simulate
from quire.sim.simulator import SimResult
from quire.sim.traces.base import Trace, TraceOptions

STORE: Final = "contiguous_max"
OWN = "own"  # the trace's longest request
WINDOWED = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 1024,
}
"""The shape of Mistral 7B v0.1 with a window of 1,024 tokens in place of 4,096, which few requests
of the trace would pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteConfig:
    """What is compared.

    Attributes:
        max_tokens: lengths of contiguous pieces, besides the trace's longest request.
        short_scale: factor on all lengths that makes the workload of short requests.
        other_requests: of the trace, in the workloads beside that of its own lengths, at most.
    """

    max_tokens: tuple[int, ...] = (4_096, 8_192)
    short_scale: float = 0.25
    other_requests: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """One workload in one store.

    Attributes:
        workload, store: their names.
        piece: size for which a piece is allocated, tokens or OWN; None if pieces have no maximum.
        piece_tokens: the same as a number.
        dropped: requests longer than that.
        waste_fraction: over time.
        end_waste_fraction: over requests, when each ends; None if pieces have no fixed size.
        running_mean: sequences at once, mean over time.
        tokens_per_s: generated.
        copied_bytes: of lanes that grew out of their place.
    """

    workload: str
    store: str
    piece: str | None
    piece_tokens: int | None
    dropped: int
    waste_fraction: float
    end_waste_fraction: float | None
    running_mean: float
    tokens_per_s: float
    copied_bytes: int


def measure_waste_of_stores(config: WasteConfig, simulated: SimulatedConfig) -> Iterator[StoreRun]:
    """Yield a run for every workload and store.

    Args:
        config: what is compared.
        simulated: trace and machine.
    """
    on = simulated.run_config()
    real = simulated.conversations()
    short = simulated.conversations(TraceOptions(length_scale=config.short_scale))
    short = replace(short, requests=short.requests[: config.other_requests])
    fewer = replace(real, requests=real.requests[: config.other_requests])
    for workload, trace in (("real", real), ("short", short)):
        yield _run(workload, trace, on, "paged")
        pieces = {str(tokens): tokens for tokens in config.max_tokens} | {
            OWN: longest_tokens(trace)
        }
        for piece, tokens in pieces.items():
            yield _run(workload, trace, on, STORE, piece=piece, piece_tokens=tokens)
        yield _run(workload, trace, on, "contiguous_growing")
    windowed = replace(on, model=ModelSpec.from_config(WINDOWED))
    for store in ("paged", "ring"):
        yield _run("window", fewer, windowed, store)


def _run(
    workload: str,
    trace: Trace,
    on: SimConfig,
    store: StoreName,
    *,
    piece: str | None = None,
    piece_tokens: int | None = None,
) -> StoreRun:
    kept = tuple(r for r in trace.requests if piece_tokens is None or r.tokens <= piece_tokens)
    kv = replace(
        on.kv, store=store, store_tokens=piece_tokens, prefix_cache=PrefixCacheConfig(enabled=False)
    )
    simulator = make_simulator(replace(trace, requests=kept), replace(on, kv=kv))
    result = simulator.run()
    fixed = {"paged": kv.page_tokens, STORE: piece_tokens}.get(store)
    generated = sum(r.answer_tokens for r in result.records if r.finished)
    return StoreRun(
        workload=workload,
        store=store,
        piece=piece,
        piece_tokens=piece_tokens,
        dropped=len(trace.requests) - len(kept),
        waste_fraction=result.gauges.waste_fraction,
        # behind a window pages return before the end
        end_waste_fraction=request_waste(result, fixed) if fixed and workload != "window" else None,
        running_mean=result.gauges.mean("running"),
        tokens_per_s=generated / result.gauges.time_s,
        copied_bytes=simulator.memory.placement.copied_bytes,
    )


def run_waste(config: WasteConfig, simulated: SimulatedConfig) -> PartResult:
    """The part."""
    runs = list(measure_waste_of_stores(config, simulated))
    return PartResult(
        claims=claims(runs),
        tables=(_table(runs, simulated),),
        charts=(_chart(runs),),
        raw={"runs": [asdict(run) for run in runs]},
    )


def claims(runs: list[StoreRun]) -> Numbers:
    """Fractions of the workload of real lengths; of the window model those of both its stores."""
    found: Numbers = {}
    for run in runs:
        if run.workload == "window":
            found[f"{run.store}_window_waste_fraction"] = run.waste_fraction
        elif run.workload == "real" and run.store == STORE:
            found[f"contiguous_waste_fraction_{run.piece}"] = run.waste_fraction
            found[f"contiguous_dropped_{run.piece}"] = run.dropped
        elif run.workload == "real":
            found[f"{run.store}_waste_fraction"] = run.waste_fraction
    return found


def _label(run: StoreRun) -> str:
    return run.store if run.piece_tokens is None else f"{run.store} {run.piece_tokens}"


def _table(runs: list[StoreRun], simulated: SimulatedConfig) -> Table:
    rows = tuple(
        (
            run.workload,
            _label(run),
            run.dropped,
            100 * run.waste_fraction,
            None if run.end_waste_fraction is None else 100 * run.end_waste_fraction,
            run.running_mean,
            run.tokens_per_s,
            run.copied_bytes / 2**30,
        )
        for run in runs
    )
    return Table(
        name="waste",
        caption=(
            f"KV memory without a token, by workload and store: {simulated.model} in "
            f"{simulated.memory} on a simulated {simulated.machine}. real: the trace's own "
            "lengths; short: a quarter of them; window: the real ones through a model whose "
            "layers look back 1,024 tokens. Dropped requests are longer than a piece."
        ),
        columns=(
            "workload",
            "store",
            "dropped requests",
            "wasted %, over time",
            "wasted %, at each end",
            "running, mean",
            "generated tokens/s",
            "copied GiB",
        ),
        rows=rows,
    )


def _chart(runs: list[StoreRun]) -> Chart:
    real = [run for run in runs if run.workload == "real"]
    words = {"paged": "paged", "contiguous_growing": "growing"}
    points = tuple(
        (words.get(r.store, f"contiguous {r.piece_tokens}"), 100 * r.waste_fraction) for r in real
    )
    return Chart(
        name="waste",
        title="Allocated KV memory without a token, real lengths",
        x_label="store",
        y_label="%",
        lines={"wasted": points},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousRun:
    """A trace served from contiguous pieces.

    Attributes:
        max_tokens: of every piece.
        num_dropped: requests longer than that, which such an allocator cannot serve.
        waste_fraction: over time, of pieces held at the same time.
        request_waste_fraction: over requests: slots without a token when each request ends.
        result: of the requests that are not too long; None if all are too long.
    """

    max_tokens: int
    num_dropped: int
    waste_fraction: float
    request_waste_fraction: float
    result: SimResult | None


def longest_tokens(trace: Trace) -> int:
    """Length of a trace's longest request: the maximum that drops nothing."""
    return max(request.tokens for request in trace.requests)


def run_contiguous(trace: Trace, config: SimConfig, max_tokens: int) -> ContiguousRun:
    """Serve a trace from pieces of `max_tokens` slots in the same bytes.

    Raises:
        ConfigError: not one piece fits into the memory.
    """
    kept = tuple(r for r in trace.requests if r.tokens <= max_tokens)
    num_dropped = len(trace.requests) - len(kept)
    if not kept:
        return ContiguousRun(
            max_tokens=max_tokens,
            num_dropped=num_dropped,
            waste_fraction=0.0,
            request_waste_fraction=0.0,
            result=None,
        )
    served = replace(trace, requests=kept, num_dropped=trace.num_dropped + num_dropped)
    kv = replace(
        config.kv,
        store=STORE,
        store_tokens=max_tokens,
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    result = simulate(served, replace(config, kv=kv))
    return ContiguousRun(
        max_tokens=max_tokens,
        num_dropped=num_dropped,
        waste_fraction=result.gauges.waste_fraction,
        request_waste_fraction=request_waste(result, max_tokens),
        result=result,
    )


def request_waste(result: SimResult, piece_tokens: int) -> float:
    """Slots without a token when each request ends, over the slots of its pieces.

    Args:
        result: of a run.
        piece_tokens: slots of a page or of a contiguous piece.
    """
    # the last token of an answer is never written
    lengths = [r.prompt_tokens + r.answer_tokens - 1 for r in result.records if r.finished]
    slots = sum(-(-length // piece_tokens) * piece_tokens for length in lengths)
    return 1 - sum(lengths) / slots if slots else 0.0
