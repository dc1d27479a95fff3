"""`python -m benchmarks kvcrush`: time to select representatives, with random weights.

alone      the base rule
kvcrush    KVCrush with this base rule
heads      KVCrush with a retained set per KV head and the best pick
kmeans     the same with k-means clusters of signatures

Overhead is the selection without the base rule's scores: signatures, distances, buckets, and the
selection by scores. The base rule selects by scores too, so what KVCrush adds is the difference:

    added overhead = (selection + signatures + representatives) with KVCrush - selection alone

as a fraction of the run with KVCrush. Scores and compaction are counted separately; KVCrush adds to
scores because every query head is scored, and the base rule alone scores KV heads.

While it runs, the methods of eviction rules are wrapped with a stopwatch. Time is charged to
the innermost open phase, so phases add up. The methods are wrapped on their classes and restored
afterwards; the engine has no code for it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Annotated, Any

import torch
import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads, quick_option
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.eviction import evict_value
from quire.cli.common import use_threads
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.eviction.eviction import PolicyEvictor
from quire.kernels.native.backend import NativeAttention
from quire.layout.config import dtype_bytes
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel
from quire.policies.base import ScorePolicy
from quire.policies.crushed import Crushed
from quire.policies.kmeans import KMeans
from quire.policies.kvcrush import KVCrush
from quire.policies.signatures.context import SelectionContext
from quire.profile.ceilings import random_prompt
from quire.scheduler.schedule_config import ScheduleConfig

COMPACTION, SCORING, SELECTION = "compaction", "scoring", "selection"
SIGNATURES, REPRESENTATIVES = "signatures", "representatives"
PHASES = (SCORING, SELECTION, SIGNATURES, REPRESENTATIVES, COMPACTION)
"""Phases of an eviction: the base rule's scores; selection by scores; signature bits; distances and
buckets, or clusters; views, tables and moves, which every rule needs. If one call of the C library
makes the decision, its selection by scores counts as representatives; one that reads the stored
scores of a rule counts as selection."""

_WATCHED: tuple[tuple[type, str, str], ...] = (
    (PolicyEvictor, "evict", COMPACTION),
    (PolicyEvictor, "evict_together", COMPACTION),
    (ScorePolicy, "checked_score", SCORING),
    (ScorePolicy, "select", SELECTION),
    (Crushed, "select", SELECTION),
    (NativeAttention, "select_lanes", SELECTION),
    (SelectionContext, "signatures", SIGNATURES),
    (KVCrush, "represent", REPRESENTATIVES),
    (KVCrush, "retained_in_c", REPRESENTATIVES),
    (KMeans, "represent", REPRESENTATIVES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """Configuration of the runs.

    Attributes:
        model: a name in SHAPES.
        base: base rule.
        rows: number of requests that run together.
        prompt_tokens, new_tokens: tokens of each prompt and of each output.
        cap, every: cap, and number of tokens evicted at once.
        share: fraction of the budget for representatives.
        dtype: dtype of weights and KV.
    """

    model: str = "125m"
    base: str = "h2o"
    rows: int = 16
    prompt_tokens: int = 1_024
    new_tokens: int = 512
    cap: int = 672
    every: int = 64
    share: float = 0.25
    dtype: str = "bfloat16"


QUICK_KVCRUSH = OverheadConfig(
    model="small", rows=4, prompt_tokens=256, new_tokens=64, cap=168, every=16
)


class Stopwatch:
    """Measures time by phase.

    Args:
        clock: clock in seconds.

    Attributes:
        seconds: time of each phase, without nested phases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the context to a phase."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now_s = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


@contextmanager
def timed_rules(watch: Stopwatch) -> Iterator[None]:
    """Measure the phases of all evictions of this process with a stopwatch."""
    with ExitStack() as stack:
        for owner, method, phase in _WATCHED:
            stack.enter_context(_wrapped(owner, method, phase, watch))
        yield


@contextmanager
def _wrapped(owner: type, method: str, phase: str, watch: Stopwatch) -> Iterator[None]:
    original: Callable[..., Any] = vars(owner)[method]

    @wraps(original)
    def timed(*arguments: Any, **options: Any) -> Any:
        with watch.phase(phase):
            return original(*arguments, **options)

    setattr(owner, method, timed)
    try:
        yield
    finally:
        setattr(owner, method, original)


ALONE, KVCRUSH, OF_HEADS, KMEANS = "alone", "kvcrush", "heads", "kmeans"
COUNTED = (SELECTION, SIGNATURES, REPRESENTATIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of a run with one rule.

    Attributes:
        evict: `--evict` value of the rule.
        run_s: time of all steps.
        seconds: time of its evictions by phase.
    """

    evict: str
    run_s: float
    seconds: Mapping[str, float]

    def fraction(self, *phases: str) -> float:
        """Fraction of the run's time in the given phases."""
        return sum(self.seconds[phase] for phase in phases) / self.run_s

    def added(self, alone: "Run", *phases: str) -> float:
        """Time of the phases in addition to another run's, as a fraction of this run's time."""
        added_s = sum(self.seconds[phase] - alone.seconds[phase] for phase in phases)
        return added_s / self.run_s


def arms(config: OverheadConfig) -> dict[str, str]:
    """`--evict` values by arm.

    Raises:
        UnknownName, ConfigError: an invalid base rule.
    """
    based = f"base=({config.base}),share={config.share:g}"
    rules = {
        ALONE: config.base,
        KVCRUSH: f"kvcrush:{based}",
        OF_HEADS: f"kvcrush:{based},sets=head,pick=best",
        KMEANS: f"kmeans:{based}",
    }
    return {
        name: evict_value(rule, config.cap, config.every, PREFILL_AND_DECODE)
        for name, rule in rules.items()
    }


def measure(config: OverheadConfig) -> dict[str, Run]:
    """Run every arm once, with random weights."""
    model = random_model(SHAPES[config.model](), dtype=getattr(torch, config.dtype))
    return {name: _run(model, config, evict) for name, evict in arms(config).items()}


def _run(model: LoadedModel, config: OverheadConfig, evict: str) -> Run:
    length = config.prompt_tokens + config.new_tokens
    memory = 2 * config.rows * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
    kv = KVConfig(memory=memory, evict=evict, prefix_cache=PrefixCacheConfig(enabled=False))
    engine = Engine(model, kv, ScheduleConfig(max_num_seqs=config.rows))
    options = SamplingParams(max_tokens=config.new_tokens, temperature=0.0, ignore_eos=True)
    for row in range(config.rows):
        engine.submit(GenerationRequest(random_prompt(model, config.prompt_tokens, row), options))
    watch, started_s = Stopwatch(), time.perf_counter()
    with timed_rules(watch):
        while engine.has_work:
            engine.step()
    run_s = time.perf_counter() - started_s
    if engine.num_generated_tokens != config.rows * config.new_tokens:
        raise InvariantError(
            f"expected {config.rows * config.new_tokens} tokens with {evict!r}, got "
            f"{engine.num_generated_tokens}"
        )
    return Run(evict=evict, run_s=run_s, seconds=watch.seconds)


def run_overhead(config: OverheadConfig) -> PartResult:
    """Run all arms."""
    runs = measure(config)
    return PartResult(
        claims=claims(runs),
        tables=(_table(config, runs),),
        raw={"runs": {name: asdict(run) for name, run in runs.items()}},
    )


def claims(runs: Mapping[str, Run]) -> Numbers:
    """Fractions of the runs' times.

    overhead_fraction, heads_overhead_fraction, kmeans_overhead_fraction: signatures, distances,
    buckets (or clusters) and selection. added_overhead_fraction, heads_added_overhead_fraction: the
    same without the selection time of the base rule alone, with one retained set per layer and per
    KV head. added_scoring_fraction, heads_added_scoring_fraction: scores with KVCrush, without
    those of the base rule alone.
    """
    alone = runs[ALONE]
    made: Numbers = {}
    for name, prefix in ((KVCRUSH, ""), (OF_HEADS, "heads_"), (KMEANS, "kmeans_")):
        made[f"{prefix}overhead_fraction"] = runs[name].fraction(*COUNTED)
        if name != KMEANS:
            made[f"{prefix}added_overhead_fraction"] = runs[name].added(alone, *COUNTED)
            made[f"{prefix}added_scoring_fraction"] = runs[name].added(alone, SCORING)
    return made


def _table(config: OverheadConfig, runs: Mapping[str, Run]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for name, run in runs.items():
        shares = (100 * run.fraction(phase) for phase in PHASES)
        added = 100 * run.added(runs[ALONE], *COUNTED)
        rows.append((name, run.run_s, *shares, 100 * run.fraction(*COUNTED), added))
    return Table(
        name="kvcrush-overhead",
        caption=(
            f"{config.rows} prompts of {config.prompt_tokens:,} tokens and outputs of "
            f"{config.new_tokens}, "
            f"cap {config.cap}, {config.every} tokens evicted at once, base {config.base}, "
            f"random-weight Llama ({config.model}), {config.dtype}. In percent of the run; "
            f"overhead is {', '.join(COUNTED)} (distances and buckets, or clusters); added is the "
            "overhead without the selection of the base rule alone."
        ),
        columns=("rule", "run s", *(f"{phase} %" for phase in PHASES), "overhead %", "added %"),
        rows=tuple(rows),
    )


PARTS: Mapping[str, Callable[[OverheadConfig], PartResult]] = {"overhead": run_overhead}


def kvcrush(
    *,
    base: Annotated[str, typer.Option(help="Base rule, with options if any.")] = "h2o",
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.")] = "bfloat16",
    out: Out = None,
    quick: Annotated[bool, quick_option("A small shape, few short prompts.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the time that KVCrush and k-means add to a run with their base rule."""
    config = QUICK_KVCRUSH if quick else OverheadConfig()
    dtype_bytes(dtype)  # refuses unknown types
    config = replace(config, base=base, dtype=dtype)
    arms(config)  # refuses invalid rules
    use_threads(threads)
    run_command("kvcrush", PARTS, "", config, asdict(config), out, quick=quick, as_json=as_json)
