"""Parts of the memory benchmark that are measured: on memory without bytes, or on the engine.

pages       effect of the page size on waste, page table bytes and step time
beam        KV bytes of a beam search over one sequence, with copy-on-write
swap        resuming a preempted sequence by swapping or by recompute, by length
prefix      many requests with one system prompt, with and without the prefix cache
cache       generation with and without a KV cache, by length
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from benchmarks.common.decoding import decoding_engine
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Chart, Numbers, PartResult
from benchmarks.common.tables import table_of
from benchmarks.memory.simulated import SimulatedConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, InvariantError
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.kv.swap import Swapped, swap_in, swap_out
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.profile.ceilings import kv_memory_for, random_prompt, seconds
from quire.sampling.outputs import Usage
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.models import model_shape
from quire.sim.run import simulate
from quire.sim.traces.base import Trace

_NO_CACHE = PrefixCacheConfig(enabled=False)

# ---- page sizes ----------------------------------------------------------------------------------
#
# Waste is that of a simulated trace. Tables are those of sequences of the trace's lengths in all
# layers of the simulated model. Step times are measured, with all sizes in turn.


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


def time_steps(config: PageSizesConfig) -> dict[int, list[float]]:
    """Decode step times by page size, one per repeat."""
    model = random_model(SHAPES[config.model](), dtype=torch.float32)
    new_tokens = (config.repeats + 1) * config.steps + 2 * config.rows
    prompts = [random_prompt(model, config.prompt_tokens, row) for row in range(config.rows)]
    engines = {}
    for size in config.sizes:
        row_bytes = model.spec.kv_bytes_per_token(4) * (config.prompt_tokens + new_tokens + size)
        kv = KVConfig(
            memory=row_bytes * config.rows + (16 << 20), page_tokens=size, prefix_cache=_NO_CACHE
        )
        engines[size] = decoding_engine(model, kv, prompts, new_tokens)
    times_s: dict[int, list[float]] = {size: [] for size in config.sizes}
    for i in range(config.repeats + 1):
        for size, engine in engines.items():
            step_s = statistics.median(seconds(engine.step) for _ in range(config.steps))
            times_s[size] += [step_s] if i else []
    return times_s


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


def run_page_sizes(config: PageSizesConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    times_s = time_steps(config)
    step_s = {size: statistics.median(times) for size, times in times_s.items()}
    trace, on = simulated.conversations(requests=config.requests), simulated.run_config()
    waste: dict[int, float] = {}
    tables: dict[int, float] = {}
    for size in config.sizes:
        result = simulate(trace, replace(on, kv=replace(on.kv, page_tokens=size)))
        waste[size] = result.gauges.waste_fraction
        tables[size] = table_fraction(on.model, trace, size, config.table_sequences)
    claims: Numbers = {}
    for size in config.sizes:
        claims[f"page_{size}_waste_fraction"] = waste[size]
        claims[f"page_{size}_table_fraction"] = tables[size]
        claims[f"page_{size}_step_s"] = step_s[size]
    table = table_of(
        "pages",
        f"Page sizes: waste over time of {simulated.model} on the trace, tables of its "
        f"layers, and decode steps of a random-weight Llama ({config.model}, float32) with "
        f"{config.rows} sequences of {config.prompt_tokens:,} tokens, medians of "
        f"{config.repeats}.",
        config.sizes,
        {
            "tokens per page": lambda size: size,
            "wasted %": lambda size: 100 * waste[size],
            "page tables %": lambda size: 100 * tables[size],
            "decode step ms": lambda size: 1e3 * step_s[size],
        },
    )
    chart = Chart(
        name="pages",
        title="Allocated bytes without KV of a token, by page size",
        x_label="tokens per page",
        y_label="% of allocated bytes",
        lines={
            "wasted": tuple((size, 100 * share) for size, share in waste.items()),
            "tables": tuple((size, 100 * share) for size, share in tables.items()),
        },
        log_x=True,
        log_y=True,
    )
    raw = {"step_s": {str(size): times for size, times in times_s.items()}}
    return PartResult(claims=claims, tables=(table,), charts=(chart,), raw=raw)


# ---- beams ---------------------------------------------------------------------------------------
#
# The beams share the pages before their first difference. A beam that writes to a shared page
# copies it first. In `fork once`, all beams diverge at one token, which needs the most memory. In
# `reorder`, each step draws its beams at random from the last step's beams. Both use the engine's
# memory without bytes. `engine` is the engine's beam search on a small model.

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

    @property
    def floor_by_tokens(self) -> float:
        """Lower bound of the ratio: shared tokens are stored once, other tokens once per beam."""
        return (self.tokens + (self.beams - 1) * self.apart) / self.tokens


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
    runs = []
    for page_tokens in config.page_sizes:
        memory = _beam_memory(config, page_tokens)
        row = memory.start()
        memory.grow(np.array([row]), np.array([config.tokens], dtype=np.int32))
        for course in (FORK_ONCE, REORDER):
            peak_bytes = _peak_bytes(config, page_tokens, course)
            runs.append(
                BeamRun(
                    course=course,
                    page_tokens=page_tokens,
                    peak_bytes=peak_bytes,
                    one_bytes=memory.row_bytes(row),
                )
            )
    return [*runs, _search_with_engine(config)]


def _beam_memory(config: BeamConfig, page_tokens: int) -> KVMemory:
    layout = layout_for(model_shape(config.model), codec="bfloat16", page_tokens=page_tokens)
    pages = 2 * config.beams * (config.tokens // page_tokens + 2)
    total_bytes = pages * layout.smallest_sequence_bytes + (256 << 20)
    return KVMemory(layout, total_bytes, 2 * config.beams)


def _peak_bytes(config: BeamConfig, page_tokens: int, course: str) -> int:
    memory, rng = _beam_memory(config, page_tokens), random.Random(config.seed)
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
    model = random_model(SHAPES[config.engine_model](), dtype=torch.float32)
    prompt = random_prompt(model, config.tokens - config.apart, config.seed)
    peaks = []
    for beams in (config.beams, 1):
        kv = KVConfig(memory="64MiB", page_tokens=CLAIMED_PAGE_TOKENS, prefix_cache=_NO_CACHE)
        engine = Engine(model, kv, ScheduleConfig())
        options = SamplingParams(
            n=beams,
            use_beam_search=beams > 1,
            max_tokens=config.apart,
            temperature=0.0,
            ignore_eos=True,
        )
        engine.submit(GenerationRequest(prompt, options))
        while engine.has_work:
            engine.step()
        peaks.append(engine.stats().kv_peak_bytes)
    return BeamRun(
        course=ENGINE, page_tokens=CLAIMED_PAGE_TOKENS, peak_bytes=peaks[0], one_bytes=peaks[1]
    )


def run_beam(config: BeamConfig) -> PartResult:
    """Run the part."""
    runs = measure_beams(config)
    table = table_of(
        "beam",
        f"Copy-on-write: {config.beams} beams of {config.tokens:,} tokens that differ in the "
        f"last {config.apart}: {config.model}, and the engine with a random-weight Llama "
        f"({config.engine_model}, float32). Lower bound by tokens: "
        f"{config.floor_by_tokens:.3f} of one sequence.",
        runs,
        {
            "search": lambda run: run.course,
            "tokens per page": lambda run: run.page_tokens,
            "peak B": lambda run: run.peak_bytes,
            "times one sequence": lambda run: run.ratio,
            "without sharing": lambda _: config.beams,
        },
    )
    raw = {"runs": [asdict(run) for run in runs]}
    return PartResult(claims=beam_claims(runs), tables=(table,), raw=raw)


def beam_claims(runs: list[BeamRun]) -> Numbers:
    """Largest ratio of all searches with pages of 16 tokens."""
    found = [run.ratio for run in runs if run.page_tokens == CLAIMED_PAGE_TOKENS]
    return {"beam4_memory_ratio": max(found)}


# ---- swap ----------------------------------------------------------------------------------------
#
# Both ways are measured for each length in one engine and in turn, so that changes of the machine's
# load affect both. A prompt is prefilled, which is the cost of recompute; its KV is then swapped
# out and in.

_SPARE_TOKENS = 256  # new tokens, and unused slots of last pages
BREAKEVEN = "swap_recompute_breakeven_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """Configuration of the measurement.

    Attributes:
        model: a name in SHAPES.
        lengths: tokens of the prompts.
        repeats: measured rounds of all lengths, after one warm-up round.
        max_num_batched_tokens: token budget of a step.
    """

    model: str = "125m"
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1_024, 2_048, 4_096)
    repeats: int = 5
    max_num_batched_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTime:
    """Measurements of one sequence.

    Attributes:
        tokens: tokens of its prompt.
        kv_bytes: KV bytes it held.
        recompute_s: time to prefill it.
        swap_s: time to swap it out and in.
    """

    tokens: int
    kv_bytes: int
    recompute_s: float
    swap_s: float


def measure_swap(model: LoadedModel, config: SwapConfig) -> Iterator[SwapTime]:
    """Yield the times of every length, round by round.

    Args:
        model: model with a context at least two tokens longer than every length.
        config: lengths and repeats.

    Raises:
        ConfigError: a prompt exceeds the context.
    """
    longest = max(config.lengths)
    if longest + 2 > model.spec.max_positions:
        raise ConfigError(
            f"expected prompts of at most {model.spec.max_positions - 2} tokens for a context of "
            f"{model.spec.max_positions}, got {longest}: use shorter prompts"
        )
    kv = KVConfig(
        memory=kv_memory_for(model.spec, longest + 2),
        swap_space=model.spec.kv_bytes(longest + _SPARE_TOKENS, model.decoder.dtype.itemsize),
        prefix_cache=_NO_CACHE,
    )
    engine = Engine(model, kv, ScheduleConfig(max_num_batched_tokens=config.max_num_batched_tokens))
    seeds = itertools.count()
    for round_number in range(config.repeats + 1):
        for tokens in config.lengths:
            time = _swap_one(engine, random_prompt(model, tokens, next(seeds)))
            if round_number:
                yield time


def _swap_one(engine: Engine, prompt: list[int]) -> SwapTime:
    pool, memory = engine.pool.host, engine.pool.kv.memory
    if pool is None:
        raise InvariantError("expected an engine with swap space, got one without")
    request_id = engine.submit(
        GenerationRequest(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    )
    recompute_s = 0.0
    while not recompute_s or engine.scheduler.running[0].progress.num_computed < len(prompt):
        recompute_s += seconds(engine.step)
    request = engine.scheduler.running[0]
    kv_bytes = memory.row_bytes(request.memory.row)
    swapped: list[Swapped] = []
    out_s = seconds(lambda: swapped.append(swap_out(memory, [request.memory.row], pool)))
    rows: list[int] = []
    back_s = seconds(lambda: rows.extend(swap_in(memory, swapped[0])))
    [request.memory.row] = rows
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    return SwapTime(
        tokens=len(prompt), kv_bytes=kv_bytes, recompute_s=recompute_s, swap_s=out_s + back_s
    )


def swap_medians(times: Sequence[SwapTime]) -> dict[int, SwapTime]:
    """Median times by length."""
    found: dict[int, SwapTime] = {}
    for tokens in sorted({time.tokens for time in times}):
        of = [time for time in times if time.tokens == tokens]
        found[tokens] = SwapTime(
            tokens=tokens,
            kv_bytes=of[0].kv_bytes,
            recompute_s=statistics.median(time.recompute_s for time in of),
            swap_s=statistics.median(time.swap_s for time in of),
        )
    return found


def measured_breakeven(ratios: Mapping[int, float]) -> float:
    """Length above which swapping is faster.

    Between the longest length at which recompute was faster and the next one, the ratio is
    interpolated, both on logarithmic scales.

    Args:
        ratios: recompute time over swap time, by length.

    Returns:
        Tokens; 0 if swapping was faster at every length, infinity if recompute was faster at the
        longest length.
    """
    lengths = sorted(ratios)
    slower = [tokens for tokens in lengths if ratios[tokens] <= 1]
    if not slower:
        return 0.0
    low = slower[-1]
    if low == lengths[-1]:
        return math.inf
    high = lengths[lengths.index(low) + 1]
    fraction = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low * math.exp(fraction * math.log(high / low))


def run_swap(config: SwapConfig) -> PartResult:
    """Run the part; an infinite break-even length is omitted from the claims."""
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    times = list(measure_swap(model, config))
    found = swap_medians(times)
    breakeven = measured_breakeven({n: of.recompute_s / of.swap_s for n, of in found.items()})
    if math.isinf(breakeven):
        words = "Recompute was faster at every length."
    elif breakeven:
        words = f"Swapping is faster from {breakeven:,.0f} tokens on."
    else:
        words = "Swapping was faster at every length."
    table = table_of(
        "swap",
        f"A preempted sequence, swapped out and in, or recomputed: random-weight Llama "
        f"({config.model}), bfloat16, medians of {config.repeats}. {words}",
        found.values(),
        {
            "tokens": lambda of: of.tokens,
            "KV MB": lambda of: of.kv_bytes / 1e6,
            "recompute ms": lambda of: 1e3 * of.recompute_s,
            "swap ms": lambda of: 1e3 * of.swap_s,
            "recompute / swap": lambda of: of.recompute_s / of.swap_s,
        },
    )
    chart = Chart(
        name="swap",
        title="Cost of a preempted sequence",
        x_label="tokens of the sequence",
        y_label="ms",
        lines={
            "recompute": tuple((n, 1e3 * of.recompute_s) for n, of in found.items()),
            "swap": tuple((n, 1e3 * of.swap_s) for n, of in found.items()),
        },
        log_x=True,
        log_y=True,
    )
    return PartResult(
        claims={BREAKEVEN: breakeven} if math.isfinite(breakeven) else {},
        tables=(table,),
        charts=(chart,),
        raw={"times": [asdict(time) for time in times]},
    )


# ---- a shared system prompt ----------------------------------------------------------------------
#
# The engine runs the same requests with and without the prefix cache, in interleaved rounds. All
# requests arrive at once, so the shared prefix must be matched while it is being prefilled. Weights
# are float32, so that the outputs of both ways must be equal, token by token.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """Configuration of the requests.

    Attributes:
        model: a name in SHAPES.
        sharers: number of requests.
        system_tokens: tokens of the shared system prompt.
        own_tokens: further prompt tokens of each request.
        new_tokens: tokens generated for each request.
        repeats: rounds of both arms, after one warm-up round.
    """

    model: str = "small"
    sharers: int = 64
    system_tokens: int = 2_000
    own_tokens: int = 32
    new_tokens: int = 16
    repeats: int = 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Prompts, equal in every process; no two questions start with the same token."""
        rng = random.Random(0)

        def drawn(tokens: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(tokens)]

        system = drawn(self.system_tokens)
        firsts = rng.sample(range(vocab_size), self.sharers)
        return [[*system, first, *drawn(self.own_tokens - 1)] for first in firsts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Measurements of one run of all requests.

    Attributes:
        shares: whether the prefix cache is enabled.
        cached_tokens: cached tokens over all requests, from `usage`.
        computed_tokens: tokens processed by the engine's steps.
        peak_bytes: peak KV bytes.
        total_s: time until the last token.
        tokens: output tokens of each request.
    """

    shares: bool
    cached_tokens: int
    computed_tokens: int
    peak_bytes: int
    total_s: float
    tokens: tuple[tuple[int, ...], ...]


def run_once(model: LoadedModel, config: PrefixConfig, *, shares: bool) -> PrefixRun:
    """Run all requests on a new engine with an empty cache."""
    length = config.system_tokens + config.own_tokens + config.new_tokens + 16
    memory = model.spec.kv_bytes_per_token(4) * length * config.sharers + (32 << 20)
    engine = Engine(
        model,
        KVConfig(memory=memory, prefix_cache=PrefixCacheConfig(enabled=shares)),
        ScheduleConfig(max_num_seqs=config.sharers),
    )
    options = SamplingParams(max_tokens=config.new_tokens, temperature=0.0, ignore_eos=True)
    prompts = config.prompts(model.spec.vocab_size)
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    answers: dict[str, list[int]] = {key: [] for key in ids}
    usages: list[Usage] = []

    def run_all() -> None:
        while engine.has_work:
            for delta in engine.step():
                answers[delta.request_id] += delta.token_ids
                usages.extend([] if delta.usage is None else [delta.usage])

    total_s = seconds(run_all)
    engine.check()
    stats = engine.stats()
    return PrefixRun(
        shares=shares,
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        computed_tokens=stats.num_processed_tokens,
        peak_bytes=stats.kv_peak_bytes,
        total_s=total_s,
        tokens=tuple(tuple(answers[key]) for key in ids),
    )


def run_prefix(config: PrefixConfig) -> PartResult:
    """Run the part: both arms in turn, after one warm-up round."""
    model = random_model(SHAPES[config.model](), dtype=torch.float32)
    rounds = [
        [run_once(model, config, shares=shares) for shares in (True, False)]
        for _ in range(config.repeats + 1)
    ]
    runs = [run for pair in rounds[1:] for run in pair]
    table = table_of(
        "prefix",
        f"{config.sharers} requests with a system prompt of {config.system_tokens:,} tokens, "
        f"{config.own_tokens} tokens of their own and {config.new_tokens} new ones, all at "
        f"once; random-weight Llama ({config.model}), float32; median of {config.repeats}.",
        runs[:2],
        {
            "prefix cache": lambda run: "enabled" if run.shares else "disabled",
            "cached prompt tokens": lambda run: run.cached_tokens,
            "tokens computed": lambda run: run.computed_tokens,
            "peak KV MB": lambda run: run.peak_bytes / 1e6,
            "total s": lambda run: statistics.median(
                other.total_s for other in runs if other.shares == run.shares
            ),
        },
    )
    raw = {"runs": [asdict(run) | {"tokens": None} for run in runs]}
    return PartResult(claims=prefix_claims(config, runs), tables=(table,), raw=raw)


def prefix_claims(config: PrefixConfig, runs: Sequence[PrefixRun]) -> Numbers:
    """Saved fraction of the system prompts of all requests but one; ratios to runs without cache.

    Args:
        config: configuration of the requests.
        runs: runs of both arms in turn, with the cache first.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    shared, alone = pairs[0]
    shareable_tokens = (config.sharers - 1) * config.system_tokens
    equal = [a == b for s, n in pairs for a, b in zip(s.tokens, n.tokens, strict=True)]
    return {
        "prefix_prefill_saved_fraction": shared.cached_tokens / shareable_tokens,
        "prefix_computed_ratio": shared.computed_tokens / alone.computed_tokens,
        "prefix_kv_bytes_ratio": shared.peak_bytes / alone.peak_bytes,
        "prefix_total_ratio": statistics.median(s.total_s / a.total_s for s, a in pairs),
        "prefix_equal_answers": statistics.mean(equal),
    }


# ---- with and without a KV cache -----------------------------------------------------------------
#
# Without a cache, every token costs a prefill of all tokens before it. With a cache, it costs one
# decode step. Both are measured at a few lengths, in turn. The time of a whole generation is the
# sum over its tokens: times between measured lengths are interpolated linearly, and below the
# shortest length its time is used.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Configuration of the part.

    Attributes:
        model: a name in SHAPES.
        lengths: numbers of tokens before the next one, ascending.
        steps: decode steps timed at each length.
        repeats: rounds of all lengths, after one warm-up round.
    """

    model: str = "125m"
    lengths: tuple[int, ...] = (16, 256, 512, 1_024, 2_048, 4_096)
    steps: int = 8
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """Time of the next token by the number of tokens before it, median over rounds.

    Attributes:
        without_s: time without a KV cache: recompute all tokens.
        with_s: time with a KV cache: a decode step, median of a few.
    """

    without_s: Mapping[int, float]
    with_s: Mapping[int, float]


def measure_generation(config: GenerationConfig) -> TokenTimes:
    """Measure all rounds, length by length."""
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    longest = max(config.lengths)
    memory = kv_memory_for(model.spec, longest + config.steps + 1)
    engine = Engine(
        model,
        KVConfig(memory=memory, prefix_cache=_NO_CACHE),
        ScheduleConfig(max_num_batched_tokens=longest, chunk_tokens=longest),
    )
    without_s: dict[int, list[float]] = {tokens: [] for tokens in config.lengths}
    with_s: dict[int, list[float]] = {tokens: [] for tokens in config.lengths}
    options = SamplingParams(max_tokens=config.steps + 1, temperature=0.0, ignore_eos=True)
    for i in range(config.repeats + 1):
        for tokens in config.lengths:
            engine.submit(GenerationRequest(random_prompt(model, tokens, i), options))
            first_s = seconds(engine.step)  # the whole prompt, and its first token
            decode_s = statistics.median(seconds(engine.step) for _ in range(config.steps))
            without_s[tokens] += [first_s] if i else []
            with_s[tokens] += [decode_s] if i else []
    return TokenTimes(
        without_s={tokens: statistics.median(times) for tokens, times in without_s.items()},
        with_s={tokens: statistics.median(times) for tokens, times in with_s.items()},
    )


def total_s(seconds_by_length: Mapping[int, float], tokens: int) -> float:
    """Time to generate `tokens` tokens from an empty prompt.

    Args:
        seconds_by_length: time of the next token, by the number of tokens before it.
        tokens: number of tokens, at most the largest of these lengths.
    """
    lengths = sorted(seconds_by_length)
    known = [seconds_by_length[length] for length in lengths]
    return float(np.interp(np.arange(tokens), lengths, known).sum())


def run_generation(config: GenerationConfig) -> PartResult:
    """Run the part."""
    times = measure_generation(config)
    claims = generation_claims(times)
    table = table_of(
        "cache",
        f"Generation with and without a KV cache, random-weight Llama ({config.model}), "
        f"bfloat16, one sequence; medians of {config.repeats}. Totals are sums over all tokens "
        "of times interpolated between these lengths.",
        config.lengths,
        {
            "tokens": lambda tokens: tokens,
            "next token, no cache ms": lambda tokens: 1e3 * times.without_s[tokens],
            "next token, cache ms": lambda tokens: 1e3 * times.with_s[tokens],
            "speed-up": lambda tokens: times.without_s[tokens] / times.with_s[tokens],
            "all tokens, no cache s": lambda tokens: total_s(times.without_s, tokens),
            "all tokens, cache s": lambda tokens: total_s(times.with_s, tokens),
            "speed-up, all tokens": lambda tokens: claims[f"cache_speedup_{tokens}"],
        },
    )
    chart = Chart(
        name="cache",
        title="The next token, with and without a KV cache",
        x_label="previous tokens",
        y_label="ms",
        lines={
            "without": tuple((tokens, 1e3 * s) for tokens, s in times.without_s.items()),
            "with": tuple((tokens, 1e3 * s) for tokens, s in times.with_s.items()),
        },
        log_x=True,
        log_y=True,
    )
    return PartResult(claims=claims, tables=(table,), charts=(chart,))


def generation_claims(times: TokenTimes) -> Numbers:
    """Speed-up of whole generations by length."""
    return {
        f"cache_speedup_{n}": total_s(times.without_s, n) / total_s(times.with_s, n)
        for n in times.without_s
    }
