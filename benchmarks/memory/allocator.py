"""Part `allocator`: what giving and taking pages costs, alone and in a decode step.

A step asks whether all rows can grow by a token and grows them, in all layers, on memory without
bytes. Lengths differ by one token each, so that in each step as many rows take new pages as in any
other. Beside it stands a whole decode step of the engine with as many sequences, from the
`overhead` bench.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from benchmarks.common.models import llama_125m
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.overhead.bench import OverheadConfig, measure_overhead
from quire.kv.memory import KVMemory
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.profile.timing import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """What is measured.

    Attributes:
        overhead: sequences and lengths, and the steps of the engine beside them.
        page_tokens: slots in a page.
        steps: of growth by one token, in each repeat.
    """

    overhead: OverheadConfig = field(default_factory=OverheadConfig)
    page_tokens: int = 16
    steps: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorTime:
    """One repeat.

    Attributes:
        pages: given and taken back, both counted.
        pages_s: seconds for all of them, rows of many pages at a time.
        step_s: mean of asking and growing by one token.
    """

    pages: int
    pages_s: float
    step_s: float


def measure_allocator(config: AllocatorConfig) -> list[AllocatorTime]:
    """All repeats, on one memory, of the shape that the overhead bench runs."""
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
    give_s = seconds(lambda: memory.grow(rows, lengths))
    given = _pages(memory)

    def step() -> None:
        if memory.can_grow(rows, ones):
            memory.grow(rows, ones)

    step_s = statistics.fmean(seconds(step) for _ in range(config.steps))
    taken = _pages(memory)
    take_s = seconds(lambda: memory.release(rows))
    return AllocatorTime(pages=given + taken, pages_s=give_s + take_s, step_s=step_s)


def _pages(memory: KVMemory) -> int:
    return sum(int(table.num_pages.sum()) for table in memory.tables.values())


def run_allocator(config: AllocatorConfig) -> PartResult:
    """The part."""
    times = measure_allocator(config)
    steps = list(measure_overhead(config.overhead))
    found = claims(times, steps)
    table = Table(
        name="allocator",
        caption=(
            f"Giving and taking pages of {config.page_tokens} tokens: {config.overhead.rows} "
            f"sequences of about {config.overhead.prompt_tokens:,} tokens, 12 layers; beside it a "
            "decode step of the random-weight Llama of 125M parameters in bfloat16."
        ),
        columns=("", "value"),
        rows=(
            ("pages given or taken a second", found["allocator_pages_per_s"]),
            ("one token for every sequence, us", 1e6 * found["allocator_step_s"]),
            ("decode step, ms", 1e3 * found["decode_step_s"]),
            ("share of the allocator, %", 100 * found["allocator_step_share"]),
            ("share of all bookkeeping, %", 100 * found["bookkeeping_share"]),
        ),
    )
    raw = {"allocator": [asdict(time) for time in times], "steps": steps}
    return PartResult(claims=found, tables=(table,), raw=raw)


def claims(times: Sequence[AllocatorTime], steps: Sequence[Mapping[str, float]]) -> Numbers:
    """Medians, and the allocator's over a step's.

    Args:
        times: of the allocator alone.
        steps: of the overhead bench.
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
