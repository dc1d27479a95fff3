"""Part `beam`: KV bytes of a beam search over one sequence, with copy-on-write.

The beams share the pages before their first difference. A beam that writes to a shared page copies
it first. Three kinds of search are measured. In `fork once`, all beams diverge at one token, which
needs the most memory. In `reorder`, each step draws its beams at random from the last step's beams.
Both use the engine's memory without bytes. `engine` is the engine's beam search on a small model
with random weights.
"""

import random
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.layout.layout import layout_for
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.models import model_shape

FORK_ONCE, REORDER, ENGINE = "fork once", "reorder", "engine"
CLAIMED_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig:
    """Configuration of the search.

    Attributes:
        beams: number of beams.
        tokens: final tokens of each beam.
        apart: number of last tokens in which beams differ.
        page_sizes: slots in a page; CLAIMED_PAGE_TOKENS must be among them.
        model: a model shape of `quire simulate`.
        engine_model: a name in SHAPES.
        seed: random seed of the drawn beams and of the prompt.
    """

    beams: int = 4
    tokens: int = 2_048
    apart: int = 50
    page_sizes: tuple[int, ...] = (1, CLAIMED_PAGE_TOKENS, 64)
    model: str = "llama-3.1-8b"
    engine_model: str = "small"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRun:
    """Measurements of one search with one page size.

    Attributes:
        course: FORK_ONCE, REORDER or ENGINE.
        page_tokens: slots in a page.
        peak_bytes: peak KV bytes of all beams.
        one_bytes: KV bytes of one sequence of the final length.
    """

    course: str
    page_tokens: int
    peak_bytes: int
    one_bytes: int

    @property
    def ratio(self) -> float:
        """Peak bytes over the bytes of one sequence."""
        return self.peak_bytes / self.one_bytes


def measure_beams(config: BeamConfig) -> list[BeamRun]:
    """Run every search with every page size; the engine's with the claimed page size."""
    runs = [
        BeamRun(
            course=course,
            page_tokens=page_tokens,
            peak_bytes=_peak_bytes(config, page_tokens, course),
            one_bytes=_sequence_bytes(config, page_tokens),
        )
        for page_tokens in config.page_sizes
        for course in (FORK_ONCE, REORDER)
    ]
    return [*runs, _search_with_engine(config)]


def _memory(config: BeamConfig, page_tokens: int) -> KVMemory:
    layout = layout_for(model_shape(config.model), codec="bfloat16", page_tokens=page_tokens)
    pages = 2 * config.beams * (config.tokens // page_tokens + 2)
    total_bytes = pages * layout.smallest_sequence_bytes + (256 << 20)
    return KVMemory(layout, total_bytes, 2 * config.beams)


def _sequence_bytes(config: BeamConfig, page_tokens: int) -> int:
    memory = _memory(config, page_tokens)
    row = memory.start()
    memory.grow(np.array([row]), np.array([config.tokens], dtype=np.int32))
    return memory.row_bytes(row)


def _peak_bytes(config: BeamConfig, page_tokens: int, course: str) -> int:
    memory, rng = _memory(config, page_tokens), random.Random(config.seed)
    rows = [memory.start()]
    memory.grow(np.array(rows), np.array([config.tokens - config.apart], dtype=np.int32))
    rows += [fork(memory, rows[0]) for _ in range(config.beams - 1)]
    for _ in range(config.apart):
        if course == REORDER:
            rows = _next_beams(memory, rng.choices(rows, k=config.beams), rows)
        memory.grow(np.array(rows), np.ones(len(rows), dtype=np.int32))
    memory.check()
    return memory.arena_peak_bytes


def _next_beams(memory: KVMemory, parents: list[int], rows: list[int]) -> list[int]:
    """Next beams; beams without children are released first, so that their pages are free."""
    children = Counter(parents)
    memory.release([row for row in rows if row not in children])
    return [
        row if i == 0 else fork(memory, row)
        for row, times in children.items()
        for i in range(times)
    ]


def _search_with_engine(config: BeamConfig) -> BeamRun:
    rng, shape = random.Random(config.seed), SHAPES[config.engine_model]()
    prompt = [rng.randrange(shape.vocab_size) for _ in range(config.tokens - config.apart)]
    peaks = []
    for beams in (config.beams, 1):
        engine = Engine(
            random_model(shape, dtype=torch.float32),
            KVConfig(
                memory="64MiB",
                page_tokens=CLAIMED_PAGE_TOKENS,
                prefix_cache=PrefixCacheConfig(enabled=False),
            ),
            ScheduleConfig(),
        )
        engine.submit(
            GenerationRequest(
                prompt,
                SamplingParams(
                    n=beams,
                    use_beam_search=beams > 1,
                    max_tokens=config.apart,
                    temperature=0.0,
                    ignore_eos=True,
                ),
            )
        )
        while engine.has_work:
            engine.step()
        peaks.append(engine.stats().kv_peak_bytes)
    return BeamRun(
        course=ENGINE,
        page_tokens=CLAIMED_PAGE_TOKENS,
        peak_bytes=peaks[0],
        one_bytes=peaks[1],
    )


def run_beam(config: BeamConfig) -> PartResult:
    """Run the part."""
    runs = measure_beams(config)
    rows = tuple(
        (run.course, run.page_tokens, run.peak_bytes, run.ratio, config.beams) for run in runs
    )
    table = Table(
        name="beam",
        caption=(
            f"Copy-on-write: {config.beams} beams of {config.tokens:,} tokens that differ in the "
            f"last {config.apart}: {config.model}, and the engine with a random-weight Llama "
            f"({config.engine_model}, float32). Lower bound by tokens: "
            f"{floor_by_tokens(config):.3f} of one sequence."
        ),
        columns=("search", "tokens per page", "peak B", "times one sequence", "without sharing"),
        rows=rows,
    )
    raw = {"runs": [asdict(run) for run in runs]}
    return PartResult(claims=claims(config, runs), tables=(table,), raw=raw)


def floor_by_tokens(config: BeamConfig) -> float:
    """Lower bound of the ratio: shared tokens are stored once, other tokens once per beam."""
    return (config.tokens + (config.beams - 1) * config.apart) / config.tokens


def claims(config: BeamConfig, runs: list[BeamRun]) -> Numbers:
    """Largest ratio of all searches with pages of 16 tokens, and the lower bound by tokens."""
    found = [run.ratio for run in runs if run.page_tokens == CLAIMED_PAGE_TOKENS]
    return {"beam4_memory_ratio": max(found), "beam4_floor_by_tokens": floor_by_tokens(config)}
