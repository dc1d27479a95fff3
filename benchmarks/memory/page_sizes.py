"""Part `pages`: effect of the page size on waste, page table bytes and step time.

Waste is that of a simulated trace. Tables are those of sequences of the trace's lengths in all
layers of the simulated model. Step times are measured: the engine decodes with pages of each size,
in turn.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.memory.simulated import SimulatedConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.kv.memory import KVMemory
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.profile.ceilings import seconds
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.run import simulate
from quire.sim.traces.base import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizesConfig:
    """Configuration of the sweep.

    Attributes:
        sizes: slots in a page.
        requests: most requests of the trace.
        table_sequences: number of sequences whose tables are counted.
        model: a name in SHAPES; the model of the measured steps.
        rows, prompt_tokens: number of decoding sequences and their prompt length.
        steps: measured steps in each repeat.
        repeats: rounds of all sizes, after one warm-up round.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    requests: int = 1_000
    table_sequences: int = 16
    model: str = "small"
    rows: int = 16
    prompt_tokens: int = 512
    steps: int = 8
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSize:
    """Measurements of one page size.

    Attributes:
        tokens: slots in a page.
        waste_fraction: allocated slots without a token, over allocated slots, over time.
        table_fraction: bytes of page tables over allocated bytes.
        step_s: decode step time by repeat.
    """

    tokens: int
    waste_fraction: float
    table_fraction: float
    step_s: tuple[float, ...]

    @property
    def median_step_s(self) -> float:
        """Median step time over all repeats."""
        return statistics.median(self.step_s)


def measure_page_sizes(config: PageSizesConfig, simulated: SimulatedConfig) -> list[PageSize]:
    """Measure every page size."""
    steps_s = time_steps(config)
    trace, on = simulated.conversations(), simulated.run_config()
    trace = replace(trace, requests=trace.requests[: config.requests])
    wastes = {
        size: simulate(
            trace, replace(on, kv=replace(on.kv, page_tokens=size))
        ).gauges.waste_fraction
        for size in config.sizes
    }
    return [
        PageSize(
            tokens=size,
            waste_fraction=wastes[size],
            table_fraction=table_fraction(on.model, trace, size, config.table_sequences),
            step_s=tuple(steps_s[size]),
        )
        for size in config.sizes
    ]


def table_fraction(model: ModelSpec, trace: Trace, page_tokens: int, sequences: int) -> float:
    """Bytes of page tables of a trace's first sequences at their final length, over KV bytes."""
    lengths = [request.tokens for request in trace.requests[:sequences]]
    layout = layout_for(model, codec="bfloat16", page_tokens=page_tokens)
    pages = sum(length // page_tokens + 2 for length in lengths)
    memory = KVMemory(layout, pages * layout.smallest_sequence_bytes + (256 << 20), len(lengths))
    rows = np.array([memory.start() for _ in lengths])
    memory.grow(rows, np.array(lengths, dtype=np.int32))
    entries = 0  # of 4 B: number and first position of each page, two counts of each lane
    for table in memory.tables.values():
        entries += 2 * int(table.num_pages.sum()) + 2 * len(rows) * table.group.num_lanes
    return 4 * entries / memory.used_bytes


def time_steps(config: PageSizesConfig) -> Mapping[int, list[float]]:
    """Decode step times by page size, one per repeat."""
    model = random_model(SHAPES[config.model](), dtype=torch.float32)
    engines = {size: _decoding_engine(model, config, size) for size in config.sizes}
    times_s: dict[int, list[float]] = {size: [] for size in config.sizes}
    for i in range(config.repeats + 1):
        for size, engine in engines.items():
            step_s = statistics.median(seconds(engine.step) for _ in range(config.steps))
            times_s[size] += [step_s] if i else []
    return times_s


def _decoding_engine(model: LoadedModel, config: PageSizesConfig, page_tokens: int) -> Engine:
    """Create an engine whose rows have finished prefill."""
    new_tokens = (config.repeats + 1) * config.steps + 2 * config.rows
    length = config.prompt_tokens + new_tokens + page_tokens
    memory = model.spec.kv_bytes_per_token(4) * length * config.rows + (16 << 20)
    engine = Engine(
        model,
        KVConfig(
            memory=memory, page_tokens=page_tokens, prefix_cache=PrefixCacheConfig(enabled=False)
        ),
        ScheduleConfig(max_num_seqs=config.rows),
    )
    rng = random.Random(0)
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for _ in range(config.rows):
        prompt = [rng.randrange(model.spec.vocab_size) for _ in range(config.prompt_tokens)]
        engine.submit(GenerationRequest(prompt, options))
    running = engine.scheduler.running
    while len(running) < config.rows or any(r.num_uncomputed > 1 for r in running):
        engine.step()
    return engine


def run_page_sizes(config: PageSizesConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    found = measure_page_sizes(config, simulated)
    rows = tuple(
        (
            size.tokens,
            100 * size.waste_fraction,
            100 * size.table_fraction,
            1e3 * size.median_step_s,
        )
        for size in found
    )
    table = Table(
        name="pages",
        caption=(
            f"Page sizes: waste over time of {simulated.model} on the trace, tables of its "
            f"layers, and decode steps of a random-weight Llama ({config.model}, float32) with "
            f"{config.rows} sequences of {config.prompt_tokens:,} tokens, medians of "
            f"{config.repeats}."
        ),
        columns=("tokens per page", "wasted %", "page tables %", "decode step ms"),
        rows=rows,
    )
    chart = Chart(
        name="pages",
        title="Allocated bytes without KV of a token, by page size",
        x_label="tokens per page",
        y_label="% of allocated bytes",
        lines={
            "wasted": tuple((size.tokens, 100 * size.waste_fraction) for size in found),
            "tables": tuple((size.tokens, 100 * size.table_fraction) for size in found),
        },
        log_x=True,
        log_y=True,
    )
    raw = {"step_s": {str(size.tokens): size.step_s for size in found}}
    return PartResult(claims=claims(found), tables=(table,), charts=(chart,), raw=raw)


def claims(found: Sequence[PageSize]) -> Numbers:
    """Waste, table fraction and median step time of each size."""
    made: Numbers = {}
    for size in found:
        made[f"page_{size.tokens}_waste_fraction"] = size.waste_fraction
        made[f"page_{size.tokens}_table_fraction"] = size.table_fraction
        made[f"page_{size.tokens}_step_s"] = size.median_step_s
    return made
