"""Part `cost`: what eviction takes of decode steps, and what being ready for it takes.

full       everything is kept
again      the same once more: what two equal arms differ by
recent     the same cap as the rule's: as much KV, nothing remembered, the cheapest choice
rule       scores and compaction when rows evict; sums of attention in every step
pressure   when=pressure in a memory that is ample, by recent and by the rule: nothing ever leaves

Evicting is part of planning a step, so its time is what planning takes more than with full KV.
Arms take turns step by step: over seconds a machine's speed drifts by more than is measured here.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.eviction.cells import FULL
from benchmarks.eviction.config import CostConfig
from benchmarks.eviction.rules import Rule
from benchmarks.throughput.arms import all_decode
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE
from quire.models.loader import LoadedModel
from quire.profile.prefill_rates import random_prompt
from quire.scheduler.schedule_config import ScheduleConfig

AGAIN, RECENT, RULE = "again", "recent", "rule"
PRESSURE_RECENT, PRESSURE_RULE = "pressure_recent", "pressure_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A decode step of one arm in one round, mean over the run.

    Attributes:
        arm: its name.
        step_s: whole, without sampling.
        schedule_s: of which planning, evictions included.
    """

    arm: str
    step_s: float
    schedule_s: float

    @property
    def model_s(self) -> float:
        """The rest: the model, attention and what is remembered of it."""
        return self.step_s - self.schedule_s


Round = Mapping[str, StepCost]


def arms(config: CostConfig) -> dict[str, str]:
    """Name of an arm to what `--evict` takes."""
    recent, rule = Rule("recent"), config.rule
    return {
        FULL: FULL,
        AGAIN: FULL,
        RECENT: recent.evict(config.cap, config.every, PREFILL_AND_DECODE),
        RULE: rule.evict(config.cap, config.every, PREFILL_AND_DECODE),
        PRESSURE_RECENT: recent.evict(config.cap, config.every, PRESSURE),
        PRESSURE_RULE: rule.evict(config.cap, config.every, PRESSURE),
    }


class TimedArm:
    """Rows of one arm that decode; every row evicts once in each round that is timed.

    Args:
        model: with random weights.
        config: rows and lengths.
        arm: its name.
        evict: what `--evict` takes.
    """

    def __init__(self, model: LoadedModel, config: CostConfig, arm: str, evict: str) -> None:
        self._config, self._arm = config, arm
        # a row decodes while the others' prompts are read, and in a round that is not counted
        most = (config.repeats + 1) * config.every + config.rows + 2
        memory = 2 * config.rows * model.spec.kv_bytes(config.cap + most, 2) + (8 << 20)
        kv = KVConfig(memory=memory, evict=evict, prefix_cache=PrefixCacheConfig(enabled=False))
        self._engine = Engine(model, kv, ScheduleConfig(max_num_seqs=config.rows))
        options = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        for row in range(config.rows):
            self._engine.submit(GenerationRequest(random_prompt(model, config.cap, row), options))
        while self._engine.has_work and not self._all_decode():
            self._engine.step()
        self._before = replace(self._engine.times)

    def _all_decode(self) -> bool:
        return all_decode(self._engine.scheduler.running, self._config.rows)

    def start(self) -> None:
        """Begin a round."""
        self._before = replace(self._engine.times)

    def step(self) -> None:
        """One step of all rows."""
        self._engine.step()

    def end(self) -> StepCost:
        """The steps since `start`; as many as each row takes from one eviction to the next."""
        if not self._all_decode():
            raise InvariantError(f"rows of arm {self._arm} have left while its steps were timed")
        now, before, steps = self._engine.times, self._before, self._config.every
        return StepCost(
            arm=self._arm,
            step_s=(now.steps_s - before.steps_s) / steps,
            schedule_s=(now.schedule_s - before.schedule_s) / steps,
        )


def measure_cost(config: CostConfig, names: Collection[str] = ()) -> list[Round]:
    """Rounds of arms, taking turns; one before them is not counted.

    Args:
        config: rows and lengths.
        names: of arms; none: all.
    """
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    requested = {arm: evict for arm, evict in arms(config).items() if not names or arm in names}
    timed = {arm: TimedArm(model, config, arm, evict) for arm, evict in requested.items()}
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


def run_cost(config: CostConfig) -> PartResult:
    """The part."""
    rounds = measure_cost(config)
    return PartResult(
        claims=claims(rounds),
        tables=(_table(config, rounds),),
        raw={"rounds": [{arm: asdict(cost) for arm, cost in r.items()} for r in rounds]},
    )


def claims(rounds: Sequence[Round]) -> Numbers:
    """Shares of a step, medians over rounds of ratios within rounds.

    eviction_cost_share: scoring and compaction of the rule, spread over all steps.
    statistics_cost_share: what the model's part of a step takes longer than under recent.
    pressure_recent_cost, pressure_rule_cost: what a step takes longer than with full KV, less 1.
    equal_arms_difference: the same of full KV once more; no smaller cost can be told from none.
    """
    return {
        "eviction_cost_share": statistics.median(
            (r[RULE].schedule_s - r[FULL].schedule_s) / r[RULE].step_s for r in rounds
        ),
        "statistics_cost_share": statistics.median(
            r[RULE].model_s / r[RECENT].model_s - 1 for r in rounds
        ),
        "pressure_recent_cost": _longer(rounds, PRESSURE_RECENT),
        "pressure_rule_cost": _longer(rounds, PRESSURE_RULE),
        "equal_arms_difference": _longer(rounds, AGAIN),
    }


def _longer(rounds: Sequence[Round], arm: str) -> float:
    return statistics.median(r[arm].step_s / r[FULL].step_s - 1 for r in rounds)


def _table(config: CostConfig, rounds: Sequence[Round]) -> Table:
    rows = []
    for arm, evict in arms(config).items():
        step_s = statistics.median(r[arm].step_s for r in rounds)
        plan_s = statistics.median(r[arm].schedule_s for r in rounds)
        over = statistics.median(r[arm].step_s / r[FULL].step_s for r in rounds)
        rows.append(
            (
                evict if arm != AGAIN else f"{evict}, again",
                1e3 * step_s,
                1e3 * plan_s,
                100 * plan_s / step_s,
                over,
            )
        )
    return Table(
        name="eviction-cost",
        caption=(
            f"{config.rows} rows of {config.cap:,} tokens decode on, random-weight Llama "
            f"({config.model}), bfloat16; every row evicts once in the {config.every} steps of a "
            f"round. Planning holds scoring and compaction. Medians of {config.repeats} rounds, "
            "step by step in turns."
        ),
        columns=("eviction", "step ms", "planning ms", "planning %", "step over full"),
        rows=tuple(rows),
    )
