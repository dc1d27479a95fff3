"""Part `reuse`: prefix cache hits in a trace of shared prefixes, by KV memory size."""

from dataclasses import dataclass, replace

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.sim.metrics import summarise
from quire.sim.run import simulate

UNBOUNDED = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseConfig:
    """Configuration of the comparison.

    Attributes:
        memories: sizes of bounded KV memories; an unbounded memory is always compared too.
        requests: most requests of the trace; None: all.
        page_tokens: slots in a page. The trace has blocks of 512 tokens; smaller pages give the
            same hits and cost the simulator up to 32 times as many blocks.
    """

    requests: int | None = None
    page_tokens: int = 512
    memories: tuple[str, ...] = ("64GiB", "256GiB", "1024GiB")


def run_reuse(config: ReuseConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part: one run of the trace for each size."""
    trace, on = simulated.prefixes(), simulated.run_config()
    trace = replace(trace, requests=trace.requests[: config.requests])
    kv = replace(on.kv, page_tokens=config.page_tokens)
    found = {
        size: summarise(simulate(trace, replace(on, kv=replace(kv, memory=size))))
        for size in (*config.memories, UNBOUNDED)
    }
    return PartResult(
        claims=claims(found),
        tables=(_table(found, trace.name, simulated, config.page_tokens),),
        charts=(_chart(found),),
        raw=found,
    )


def claims(found: dict[str, Numbers]) -> Numbers:
    """Hit fractions of every size, and the reusable fractions of the trace."""
    unbounded = found[UNBOUNDED]
    made: Numbers = {
        "mooncake_hit_fraction_unbounded": unbounded["prefix_hit_fraction"],
        "mooncake_reusable_token_fraction": unbounded["reusable_token_fraction"],
        "mooncake_reusable_block_fraction": unbounded["reusable_block_fraction"],
    }
    for size, numbers in found.items():
        if size != UNBOUNDED:
            made[f"mooncake_hit_fraction_{size}"] = numbers["prefix_hit_fraction"]
    return made


def _table(
    found: dict[str, Numbers], name: str, simulated: SimulatedConfig, page_tokens: int
) -> Table:
    unbounded = found[UNBOUNDED]
    rows = tuple(
        (
            "unbounded" if size == UNBOUNDED else size,
            100 * numbers["prefix_hit_fraction"],
            numbers["cached_tokens"],
            numbers.get("ttft_p50_s"),
            numbers.get("ttft_p99_s"),
            numbers["preemptions"],
            numbers["finished"],
        )
        for size, numbers in found.items()
    )
    return Table(
        name="reuse",
        caption=(
            f"Cached prompt tokens, {name}, {simulated.model} on a simulated "
            f"{simulated.machine}, pages of {page_tokens} tokens. The trace repeats "
            f"{unbounded['reusable_token_fraction']:.2%} of its prompt tokens as prefixes, and "
            f"{unbounded['reusable_block_fraction']:.2%} of its blocks of 512 tokens."
        ),
        columns=(
            "KV memory",
            "hit %",
            "tokens hit",
            "first token p50 s",
            "first token p99 s",
            "preemptions",
            "completed",
        ),
        rows=rows,
    )


def _chart(found: dict[str, Numbers]) -> Chart:
    points = tuple(
        ("unbounded" if size == UNBOUNDED else size, 100 * numbers["prefix_hit_fraction"])
        for size, numbers in found.items()
    )
    return Chart(
        name="reuse",
        title="Prompt tokens found in the prefix cache",
        x_label="KV memory",
        y_label="%",
        lines={"hits": points},
    )
