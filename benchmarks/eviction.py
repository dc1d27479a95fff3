"""`python -m benchmarks eviction`: time that eviction adds to decode steps, and without evicting.

Part `cost` has all arms:

full       no eviction
again      the same a second time: the difference of two equal arms
recent     the rule's cap: equal KV, no statistics, the cheapest selection
rule       scores and compaction when rows evict; attention sums in every step
others     the same for other rules, by name
pressure   when=pressure in an ample memory, with recent and with the rule: no token is evicted

Arms that evict have `cap` tokens a row at the start of every round and `every` more at its end. The
others start each round anew, with prompts of `cap` tokens, so that all arms attend to equal KV.

Part `ready` has full, again and pressure with recent. Its layers are small, so that the time added
per layer is measurable; in `cost` the step times of two equal arms differ by more. It is the same
for layers of any size: it records the position of each slot's token and checks the lengths of
lanes.

Eviction is part of planning a step, so its time is the planning time beyond that of full KV. Arms
run in turn step by step, because a machine's speed drifts within seconds by more than the effect.
Processor time is measured too: it does not count other programs on the machine.
"""

import re
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import run_command
from benchmarks.common.decoding import all_decode, decoding_engine
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from quire.cli.common import use_threads
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE
from quire.models.loader import LoadedModel
from quire.policies.eviction import make_eviction
from quire.policies.registry import FULL
from quire.profile.ceilings import random_prompt
from quire.scheduler.step import StepTimes

AGAIN, RECENT, RULE = "again", "recent", "rule"
PRESSURE_RECENT, PRESSURE_RULE = "pressure_recent", "pressure_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Configuration of one part.

    Attributes:
        model: a name in SHAPES; its weights are random.
        rule: the measured eviction rule without its cap, also with `when=pressure`.
        others: further rules whose whole cost is measured.
        cap, every: cap and eviction interval in tokens; prompts are as long as the cap.
        rows: rows that decode together.
        repeats: rounds of all variants, of `every` steps each, after one that is not counted.
    """

    model: str = "125m"
    rule: str = "average"
    others: tuple[str, ...] = ("h2o", "snapkv", "sinks", "keydiff")
    cap: int = 1_024
    every: int = 64
    rows: int = 32
    repeats: int = 5


SMALL_LAYERS = CostConfig(model="small", others=(), cap=64, every=32, repeats=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionBenchConfig:
    """Configuration of both parts."""

    cost: CostConfig = field(default_factory=CostConfig)
    ready: CostConfig = field(default_factory=lambda: SMALL_LAYERS)


QUICK_EVICTION = EvictionBenchConfig(
    cost=CostConfig(model="small", others=("h2o",), cap=128, every=16, rows=8, repeats=1),
    ready=CostConfig(model="small", cap=32, every=4, rows=2, repeats=1),
)


# ---- measurement ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A decode step of one arm, mean over the steps of a round.

    Attributes:
        arm: name of the arm.
        step_s: time of the step, without sampling.
        schedule_s: planning time in it, with evictions.
        cpu_s: processor time of the step, all threads together, with sampling.
    """

    arm: str
    step_s: float
    schedule_s: float
    cpu_s: float

    @property
    def model_s(self) -> float:
        """Time of the model, with attention and statistics."""
        return self.step_s - self.schedule_s


Round = Mapping[str, StepCost]


def arms(config: CostConfig) -> dict[str, str]:
    """`--evict` values by arm.

    Raises:
        UnknownName, ConfigError: an invalid rule, or a cap that is too small for it.
    """

    def evict(rule: str, when: str) -> str:
        return evict_value(rule, config.cap, config.every, when)

    named = {re.sub(r"\W+", "_", rule).strip("_"): rule for rule in config.others}
    return {
        FULL: FULL,
        AGAIN: FULL,
        RECENT: evict("recent", PREFILL_AND_DECODE),
        RULE: evict(config.rule, PREFILL_AND_DECODE),
        **{name: evict(rule, PREFILL_AND_DECODE) for name, rule in named.items()},
        PRESSURE_RECENT: evict("recent", PRESSURE),
        PRESSURE_RULE: evict(config.rule, PRESSURE),
    }


def evict_value(rule: str, cap: int, every: int, when: str) -> str:
    """The `--evict` value of a rule, with its options if any, for a cap and a schedule.

    Raises:
        UnknownName, ConfigError: an invalid rule, or a cap that is too small for it.
    """
    name, _, options = rule.partition(":")
    made = f"{name}:cap={cap},every={every},when={when}" + (f",{options}" if options else "")
    make_eviction(made)
    return made


class TimedArm:
    """Decoding rows of one arm; every row evicts once in each measured round.

    Args:
        model: model with random weights.
        config: rows and lengths.
        arm: name of the arm.
        evict: `--evict` value.
    """

    def __init__(self, model: LoadedModel, config: CostConfig, arm: str, evict: str) -> None:
        self._config, self._arm, self._model = config, arm, model
        self._evicts = PREFILL_AND_DECODE in evict
        # a row decodes while the other prompts are prefilled, and in a warm-up round
        self._most = (config.repeats + 1 if self._evicts else 1) * config.every + config.rows + 2
        memory = 2 * config.rows * model.spec.kv_bytes(config.cap + self._most, 2) + (8 << 20)
        disabled = PrefixCacheConfig(enabled=False)
        self._kv = KVConfig(memory=memory, evict=evict, prefix_cache=disabled)
        self._engine: Engine | None = None
        self._before, self._cpu_s = StepTimes(), 0.0

    def start(self) -> None:
        """Start a round."""
        config, model = self._config, self._model
        if self._engine is None or not self._evicts:
            self._engine = None  # frees its memory
            prompts = [random_prompt(model, config.cap, row) for row in range(config.rows)]
            self._engine = decoding_engine(model, self._kv, prompts, self._most)
        self._before, self._cpu_s = replace(self._engine.times), 0.0

    def step(self) -> None:
        """Run one step of all rows."""
        assert self._engine is not None, "start comes first"
        started_s = time.process_time()
        self._engine.step()
        self._cpu_s += time.process_time() - started_s

    def end(self) -> StepCost:
        """Mean costs of the steps since `start`, which cover one eviction of each row."""
        if self._engine is None or not all_decode(self._engine, self._config.rows):
            raise InvariantError(f"expected all rows of arm {self._arm} to decode, got fewer")
        now, before, steps = self._engine.times, self._before, self._config.every
        return StepCost(
            arm=self._arm,
            step_s=(now.steps_s - before.steps_s) / steps,
            schedule_s=(now.schedule_s - before.schedule_s) / steps,
            cpu_s=self._cpu_s / steps,
        )


def measure_cost(config: CostConfig, names: Collection[str] = ()) -> list[Round]:
    """Measure rounds of arms in turn, after one warm-up round.

    Args:
        config: rows and lengths.
        names: names of the arms; empty: all.
    """
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16, impl="auto")
    selected = {arm: evict for arm, evict in arms(config).items() if not names or arm in names}
    timed = {arm: TimedArm(model, config, arm, evict) for arm, evict in selected.items()}
    return [_round(timed, config.every) for _ in range(config.repeats + 1)][1:]


def _round(timed: Mapping[str, TimedArm], steps: int) -> Round:
    for rows in timed.values():
        rows.start()
    turns = list(timed.values())
    for _ in range(steps):
        for rows in turns:
            rows.step()
        turns = [*turns[1:], turns[0]]  # vary which variant runs before which
    return {arm: rows.end() for arm, rows in timed.items()}


def _part(claims: Numbers, table: Table, rounds: Sequence[Round]) -> PartResult:
    raw = [{arm: asdict(cost) for arm, cost in found.items()} for found in rounds]
    return PartResult(claims=claims, tables=(table,), raw={"rounds": raw})


def run_cost(config: CostConfig) -> PartResult:
    """Run the part `cost`."""
    rounds, evicts = measure_cost(config), arms(config)
    table = table_of(
        "eviction-cost",
        f"{config.rows} decoding rows of {config.cap:,} tokens, random-weight Llama "
        f"({config.model}), bfloat16; every row evicts once in the {config.every} steps of a "
        f"round. Planning includes scoring and compaction. Medians of {config.repeats} rounds, "
        "arms in turn step by step.",
        evicts,
        {
            "eviction": lambda arm: evicts[arm] + (", again" if arm == AGAIN else ""),
            "step ms": lambda arm: 1e3 * _median(rounds, lambda r: r[arm].step_s),
            "planning ms": lambda arm: 1e3 * _median(rounds, lambda r: r[arm].schedule_s),
            "planning %": lambda arm: (
                100
                * _median(rounds, lambda r: r[arm].schedule_s)
                / _median(rounds, lambda r: r[arm].step_s)
            ),
            "step over full": lambda arm: 1 + _increase(rounds, arm),
            "CPU ms": lambda arm: 1e3 * _median(rounds, lambda r: r[arm].cpu_s),
            "CPU over full": lambda arm: 1 + _cpu_increase(rounds, arm),
        },
    )
    return _part(claims(rounds), table, rounds)


def claims(rounds: Sequence[Round]) -> Numbers:
    """Fractions of a step, medians over rounds of ratios within rounds.

    eviction_cost_share: scoring and compaction of the rule, averaged over all steps.
    statistics_cost_share: increase of the model's time over recent.
    cost_NAME: increase of the processor time of a step over full KV, for each other rule.
    pressure_recent_cost, pressure_rule_cost: increase of the step time over full KV.
    equal_arms_difference: the same increase for full KV itself: the noise floor of the others.
    """
    named = {FULL, AGAIN, RECENT, RULE, PRESSURE_RECENT, PRESSURE_RULE}
    return {
        **{f"cost_{a}": _cpu_increase(rounds, a) for a in rounds[0] if a not in named},
        "eviction_cost_share": _median(
            rounds, lambda r: (r[RULE].schedule_s - r[FULL].schedule_s) / r[RULE].step_s
        ),
        "statistics_cost_share": _median(rounds, lambda r: r[RULE].model_s / r[RECENT].model_s - 1),
        "pressure_recent_cost": _increase(rounds, PRESSURE_RECENT),
        "pressure_rule_cost": _increase(rounds, PRESSURE_RULE),
        "equal_arms_difference": _increase(rounds, AGAIN),
    }


def _median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, rounds))


def _increase(rounds: Sequence[Round], arm: str) -> float:
    return _median(rounds, lambda r: r[arm].step_s / r[FULL].step_s - 1)


def _cpu_increase(rounds: Sequence[Round], arm: str) -> float:
    return _median(rounds, lambda r: r[arm].cpu_s / r[FULL].cpu_s - 1)


READY_ARMS = (FULL, AGAIN, PRESSURE_RECENT)


def run_ready(config: CostConfig) -> PartResult:
    """Run the part `ready`."""
    rounds = measure_cost(config, READY_ARMS)
    num_layers = SHAPES[config.model]().num_hidden_layers
    columns: dict[str, Callable[[str], Cell]] = {
        "arm": lambda arm: arm,
        "step ms": lambda arm: 1e3 * _median(rounds, lambda r: r[arm].step_s),
        "added us per layer": lambda arm: _layer_us(rounds, arm, num_layers),
    }
    table = table_of(
        "eviction-ready",
        f"{config.rows} decoding rows of {config.cap} tokens, random-weight Llama "
        f"({config.model}, {num_layers} layers), bfloat16; no token is evicted. Medians of "
        f"{config.repeats} rounds of {config.every} steps, arms in turn step by step.",
        READY_ARMS,
        columns,
    )
    return _part(ready_claims(rounds, num_layers), table, rounds)


def ready_claims(rounds: Sequence[Round], num_layers: int) -> Numbers:
    """Time per layer that `recent` under pressure, and a second arm of full KV, add to a step."""
    return {
        "ready_layer_us": _layer_us(rounds, PRESSURE_RECENT, num_layers),
        "ready_equal_layer_us": _layer_us(rounds, AGAIN, num_layers),
    }


def _layer_us(rounds: Sequence[Round], arm: str, num_layers: int) -> float:
    return 1e6 * _median(rounds, lambda r: r[arm].step_s - r[FULL].step_s) / num_layers


# ---- the command ---------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[EvictionBenchConfig], PartResult]] = {
    "cost": lambda config: run_cost(config.cost),
    "ready": lambda config: run_ready(config.ready),
}


def eviction(
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    rules: Annotated[
        str,
        typer.Option(
            help="Rules of the part cost, separated by semicolons: 'h2o; snapkv:window=16'. The "
            "first also runs with when=pressure."
        ),
    ] = "",
    out: Out = None,
    quick: Annotated[bool, quick_option("Small shapes, one round.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the time that eviction adds to decode steps, and without evicting."""
    config = QUICK_EVICTION if quick else EvictionBenchConfig()
    if rules.strip():
        first, *others = (rule.strip() for rule in rules.split(";"))
        config = replace(config, cost=replace(config.cost, rule=first, others=tuple(others)))
        arms(config.cost)  # refuses invalid rules before a part runs
    use_threads(threads)
    run_command("eviction", PARTS, parts, config, asdict(config), out, quick=quick, as_json=as_json)
