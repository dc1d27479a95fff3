"""Part `allocator`: cost of allocating and freeing pages, alone and in a decode step.

Every step checks whether all rows can grow by one token and grows them, in all layers, on memory
without bytes. Lengths differ by one token, so that every step allocates about as many new pages.
A whole decode step of the engine with as many sequences comes from the `overhead` benchmark.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from benchmarks.common.models import llama_125m
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.overhead import OverheadConfig, measure_overhead
from quire.kv.memory import KVMemory
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.profile.ceilings import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """Configuration of the part.

    Attributes:
        overhead: sequences, lengths and steps, shared with the engine's decode steps.
        page_tokens: slots in a page.
        steps: steps of growth by one token, in each repeat.
    """

    overhead: OverheadConfig = field(default_factory=OverheadConfig)
    page_tokens: int = 16
    steps: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorTime:
    """Measurements of one repeat.

    Attributes:
        pages: number of allocated pages plus number of freed pages.
        pages_s: total time to allocate and free them, many pages of a row at once.
        step_s: mean time to check and grow all rows by one token.
    """

    pages: int
    pages_s: float
    step_s: float


def measure_allocator(config: AllocatorConfig) -> list[AllocatorTime]:
    """Run all repeats on one memory, in the model shape of the overhead benchmark."""
    spec = ModelSpec.from_config(llama_125m().to_dict())
    layout = layout_for(spec, codec="bfloat16", page_tokens=config.page_tokens)
    rows = config.overhead.rows
    longest = config.overhead.prompt_tokens + rows + config.steps
    row_bytes = (longest // config.page_tokens + 2) * layout.smallest_sequence_bytes
    memory = KVMemory(layout, rows * row_bytes + (64 << 20), rows)
    return [_measure_once(memory, config) for _ in range(config.overhead.repeats)]


def _measure_once(memory: KVMemory, config: AllocatorConfig) -> AllocatorTime:
    rows = np.array([memory.start() for _ in range(config.overhead.rows)])
    lengths = (config.overhead.prompt_tokens + np.arange(len(rows))).astype(np.int32)
    ones = np.ones(len(rows), dtype=np.int32)
    allocate_s = seconds(lambda: memory.grow(rows, lengths))
    allocated = _pages(memory)

    def step() -> None:
        if memory.can_grow(rows, ones):
            memory.grow(rows, ones)

    step_s = statistics.fmean(seconds(step) for _ in range(config.steps))
    freed = _pages(memory)
    free_s = seconds(lambda: memory.release(rows))
    return AllocatorTime(pages=allocated + freed, pages_s=allocate_s + free_s, step_s=step_s)


def _pages(memory: KVMemory) -> int:
    return sum(int(table.num_pages.sum()) for table in memory.tables.values())


def run_allocator(config: AllocatorConfig) -> PartResult:
    """Run the part."""
    times = measure_allocator(config)
    steps = list(measure_overhead(config.overhead))
    found = claims(times, steps)
    table = Table(
        name="allocator",
        caption=(
            f"Allocating and freeing pages of {config.page_tokens} tokens: {config.overhead.rows} "
            f"sequences of about {config.overhead.prompt_tokens:,} tokens, 12 layers; and a decode "
            "step of the random-weight Llama of 125M parameters in bfloat16."
        ),
        columns=("", "value"),
        rows=(
            ("pages allocated or freed per second", found["allocator_pages_per_s"]),
            ("allocating one token for every sequence, us", 1e6 * found["allocator_step_s"]),
            ("decode step, ms", 1e3 * found["decode_step_s"]),
            ("allocator, % of the step", 100 * found["allocator_step_share"]),
            ("all bookkeeping, % of the step", 100 * found["bookkeeping_share"]),
        ),
    )
    raw = {"allocator": [asdict(time) for time in times], "steps": steps}
    return PartResult(claims=found, tables=(table,), raw=raw)


def claims(times: Sequence[AllocatorTime], steps: Sequence[Mapping[str, float]]) -> Numbers:
    """Medians, and the allocator's time over a step's.

    Args:
        times: times of the allocator alone.
        steps: results of the overhead benchmark.
    """
    step_s = statistics.median(step["step_s"] for step in steps)
    alone_s = statistics.median(time.step_s for time in times)
    return {
        "allocator_pages_per_s": statistics.median(t.pages / t.pages_s for t in times),
        "allocator_step_s": alone_s,
        "decode_step_s": step_s,
        "allocator_step_share": alone_s / step_s,
        "bookkeeping_share": statistics.median(step["share"] for step in steps),
    }
