"""Configurations of the eviction benchmark, at full size and small."""

from dataclasses import dataclass, field, replace

from benchmarks.common.command import names_of
from benchmarks.quality.cells import TasksConfig
from benchmarks.quality.rules import DEFAULT_RULES, Rule, parts_of_budgets, rules_of
from quire.errors import ConfigError
from quire.evals.tasks import FAMILIES
from quire.layout.eviction import PREFILL_AND_DECODE, PREFILL_END, SCHEDULES

RULES = tuple(map(Rule, DEFAULT_RULES))
ARTICLE_RULES = tuple(map(Rule, ("random", "recent", "sinks", "h2o", "h2o_sinks")))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsConfig(TasksConfig):
    """Quality and bytes by rule, budget and task.

    Attributes:
        rules: eviction rules; full KV always runs too.
        budgets: caps as fractions of `tokens`.
        schedules: eviction schedules.
        every: number of tokens evicted at once, for schedules with repeated evictions.
    """

    prompts: int = 200
    rules: tuple[Rule, ...] = RULES
    budgets: tuple[float, ...] = (0.5, 0.25)
    schedules: tuple[str, ...] = (PREFILL_END, PREFILL_AND_DECODE)
    every: int = 16

    def __post_init__(self) -> None:
        TasksConfig.__post_init__(self)
        if not all(0 < budget < 1 for budget in self.budgets):
            requested = ", ".join(f"{100 * budget:g} %" for budget in self.budgets)
            raise ConfigError(f"expected budgets above 0 and below 100 %, got {requested}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityConfig:
    """Configuration of the perplexity part: texts processed under a cap, with real eviction.

    Attributes:
        rules: eviction policies; full KV always runs too.
        tokens: length of each text.
        texts: number of texts.
        budget: cap as a fraction of `tokens`.
        every: tokens that are evicted, and then processed, at a time.
        rows: texts in a batch.
    """

    rules: tuple[Rule, ...] = ARTICLE_RULES
    tokens: int = 2_048
    texts: int = 24
    budget: float = 0.25
    every: int = 32
    rows: int = 8

    @property
    def cap(self) -> int:
        """Cap in tokens."""
        return int(self.budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedConfig(PerplexityConfig):
    """Configuration of the part `kept`, with one picture of each rule.

    Attributes:
        bins: number of equal sections of a text.
    """

    rules: tuple[Rule, ...] = RULES
    tokens: int = 1_024
    texts: int = 8
    bins: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Configuration of the parts `cost` and `ready`: time that eviction adds to decode steps.

    Attributes:
        model: a name in SHAPES; its weights are random.
        rule: the measured eviction policy, also with `when=pressure`.
        others: further policies whose whole cost is measured.
        cap, every: cap and eviction interval in tokens; prompts are as long as the cap.
        rows: rows that decode together.
        repeats: rounds of all variants, of `every` steps each, after one that is not counted.
    """

    model: str = "125m"
    rule: Rule = field(default_factory=lambda: Rule("average"))
    others: tuple[Rule, ...] = tuple(map(Rule, ("h2o", "snapkv", "sinks", "keydiff")))
    cap: int = 1_024
    every: int = 64
    rows: int = 32
    repeats: int = 5


SMALL_LAYERS = CostConfig(model="small", others=(), cap=64, every=32, repeats=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionBenchConfig:
    """Configuration of all parts, and the evaluated model: a folder, a hub name or quire-tiny."""

    model: str = "quire-tiny"
    quality: CellsConfig = field(default_factory=CellsConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    kept: RetainedConfig = field(default_factory=RetainedConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    ready: CostConfig = field(default_factory=lambda: SMALL_LAYERS)


QUICK_EVICTION = EvictionBenchConfig(
    quality=CellsConfig(tasks=("lines", "niah"), budgets=(0.25,), tokens=256, prompts=10),
    perplexity=PerplexityConfig(tokens=512, texts=2),
    kept=RetainedConfig(tokens=256, texts=1, every=16, bins=16),
    cost=CostConfig(model="small", others=(Rule("h2o"),), cap=128, every=16, rows=8, repeats=1),
    ready=CostConfig(model="small", cap=32, every=4, rows=2, repeats=1),
)


def configured(
    config: EvictionBenchConfig,
    rules: str,
    tasks: str,
    budgets: str,
    when: str,
    prompts: int | None,
) -> EvictionBenchConfig:
    """Apply the given options; unset options keep each part's own values.

    Raises:
        UnknownName: no such rule, task or schedule.
        ConfigError: an invalid budget.
    """
    quality = replace(config.quality, prompts=prompts or config.quality.prompts)
    if tasks.strip():
        quality = replace(quality, tasks=names_of(tasks, FAMILIES, "task"))
    if when.strip():
        schedules = names_of(when, dict.fromkeys(SCHEDULES), "eviction schedule")
        quality = replace(quality, schedules=schedules)
    if budgets.strip():
        quality = replace(quality, budgets=parts_of_budgets(budgets))
    config = replace(config, quality=quality)
    if not rules.strip():
        return config
    selected = rules_of(rules)
    return replace(
        config,
        quality=replace(config.quality, rules=selected),
        perplexity=replace(config.perplexity, rules=selected),
        kept=replace(config.kept, rules=selected),
        cost=replace(config.cost, rule=selected[0], others=selected[1:]),
    )
