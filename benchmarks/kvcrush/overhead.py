"""Part `overhead`: what choosing representatives takes of a run, with random weights.

alone      the base rule
kvcrush    around it
kmeans     clusters of signatures in its place

Counted as overhead is all of choosing but the base rule's scores: signatures, distances, buckets,
and the selection by scores, which the base rule has as well. Scores and compaction stand apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.kvcrush.arms import around, crushed
from benchmarks.kvcrush.config import OverheadConfig
from benchmarks.kvcrush.stopwatch import (
    COMPACTION,
    PHASES,
    REPRESENTATIVES,
    SCORING,
    SELECTION,
    SIGNATURES,
    Stopwatch,
    watched_rules,
)
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel
from quire.profile.prefill_rates import random_prompt
from quire.scheduler.schedule_config import ScheduleConfig

ALONE, KVCRUSH, KMEANS = "alone", "kvcrush", "kmeans"
COUNTED = (SELECTION, SIGNATURES, REPRESENTATIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole run under one rule.

    Attributes:
        evict: the rule.
        run_s: all steps.
        seconds: of its evictions, by phase.
    """

    evict: str
    run_s: float
    seconds: Mapping[str, float]

    @property
    def chosen_s(self) -> float:
        """Of choosing, scores not counted."""
        return sum(self.seconds[phase] for phase in COUNTED)

    def fraction(self, *phases: str) -> float:
        """Of the run that phases take."""
        return sum(self.seconds[phase] for phase in phases) / self.run_s


def arms(config: OverheadConfig) -> dict[str, str]:
    """Name of an arm to what `--evict` takes."""
    share = f"share={config.share:g}"
    rules = {
        ALONE: config.base,
        KVCRUSH: crushed(config.base, config.share),
        KMEANS: around("kmeans", config.base, share),
    }
    return {
        name: rule.evict(config.cap, config.every, PREFILL_AND_DECODE)
        for name, rule in rules.items()
    }


def measure(config: OverheadConfig, clock: Callable[[], float] = perf_counter) -> dict[str, Run]:
    """Run every arm once.

    Args:
        config: of the part.
        clock: seconds.
    """
    model = random_model(SHAPES[config.model](), dtype=getattr(torch, config.dtype))
    return {name: _run(model, config, evict, clock) for name, evict in arms(config).items()}


def _run(model: LoadedModel, config: OverheadConfig, evict: str, clock: Callable[[], float]) -> Run:
    length = config.prompt_tokens + config.new_tokens
    memory = 2 * config.rows * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
    kv = KVConfig(memory=memory, evict=evict, enable_prefix_caching=False)
    engine = Engine(model, kv, ScheduleConfig(max_num_seqs=config.rows))
    options = SamplingParams(max_tokens=config.new_tokens, temperature=0.0, ignore_eos=True)
    for row in range(config.rows):
        engine.submit(GenerationRequest(random_prompt(model, config.prompt_tokens, row), options))
    watch, started_s = Stopwatch(clock), clock()
    with watched_rules(watch):
        while engine.has_work:
            engine.step()
    run_s = clock() - started_s
    if engine.num_generated_tokens != config.rows * config.new_tokens:
        raise InvariantError(
            f"expected {config.rows * config.new_tokens} tokens of a bench under {evict!r}, got "
            f"{engine.num_generated_tokens}"
        )
    return Run(evict=evict, run_s=run_s, seconds=watch.seconds)


def run_overhead(config: OverheadConfig) -> PartResult:
    """The part."""
    runs = measure(config)
    return PartResult(
        claims=claims(runs),
        tables=(_table(config, runs),),
        raw={"runs": {name: asdict(run) for name, run in runs.items()}},
    )


def claims(runs: Mapping[str, Run]) -> Numbers:
    """Parts of runs' times.

    overhead_fraction, kmeans_overhead_fraction: signatures, distances, buckets (clusters) and
    selection. kmeans_overhead_over_rest: over the time of all else, as the paper has it.
    alone_selection_fraction: selection where there is the base rule alone.
    base_scoring_fraction, compaction_fraction: of the run with KVCrush.
    """
    crush, kmeans = runs[KVCRUSH], runs[KMEANS]
    return {
        "overhead_fraction": crush.fraction(*COUNTED),
        "signatures_fraction": crush.fraction(SIGNATURES),
        "representatives_fraction": crush.fraction(REPRESENTATIVES),
        "selection_fraction": crush.fraction(SELECTION),
        "alone_selection_fraction": runs[ALONE].fraction(*COUNTED),
        "base_scoring_fraction": crush.fraction(SCORING),
        "compaction_fraction": crush.fraction(COMPACTION),
        "kmeans_overhead_fraction": kmeans.fraction(*COUNTED),
        "kmeans_overhead_over_rest": kmeans.chosen_s / (kmeans.run_s - kmeans.chosen_s),
    }


def _table(config: OverheadConfig, runs: Mapping[str, Run]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for name, run in runs.items():
        shares = (100 * run.fraction(phase) for phase in PHASES)
        rows.append((name, run.run_s, *shares, 100 * run.fraction(*COUNTED)))
    return Table(
        name="kvcrush-overhead",
        caption=(
            f"{config.rows} prompts of {config.prompt_tokens:,} tokens and {config.new_tokens} new "
            f"ones, cap {config.cap}, {config.every} leave at a time, base {config.base.text}, "
            f"random-weight Llama ({config.model}), {config.dtype}. In per cent of the run; "
            f"overhead is {', '.join(COUNTED)} (distances and buckets, or clusters)."
        ),
        columns=("rule", "run s", *(f"{phase} %" for phase in PHASES), "overhead %"),
        rows=tuple(rows),
    )
