"""What the eviction bench runs, at full size and small."""

from dataclasses import dataclass, field

from benchmarks.eviction.rules import DEFAULT_RULES, Rule
from quire.errors import ConfigError
from quire.layout.eviction import PREFILL_AND_DECODE, PREFILL_END

TASKS = ("lines", "kv", "niah", "facts", "copy", "labels")
RULES = tuple(map(Rule, DEFAULT_RULES))
ARTICLE_RULES = tuple(map(Rule, ("random", "recent", "sinks", "h2o", "h2o_sinks")))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsConfig:
    """Quality and bytes of rules, budgets and tasks.

    Attributes:
        rules: full is always there besides.
        budgets: caps as parts of `tokens`.
        tasks: of `quire.evals`.
        schedules: when the rules run.
        tokens: most of a prompt with its answer.
        prompts: of each cell.
        every: tokens that leave at a time, where they leave more than once.
        rows: requests that run at once.
    """

    rules: tuple[Rule, ...] = RULES
    budgets: tuple[float, ...] = (0.5, 0.25)
    tasks: tuple[str, ...] = TASKS
    schedules: tuple[str, ...] = (PREFILL_END, PREFILL_AND_DECODE)
    tokens: int = 512
    prompts: int = 200
    every: int = 16
    rows: int = 32

    def __post_init__(self) -> None:
        if not all(0 < budget < 1 for budget in self.budgets):
            requested = ", ".join(f"{100 * budget:g} %" for budget in self.budgets)
            raise ConfigError(f"expected budgets above 0 and below 100 %, got {requested}")
        if self.prompts < 1:
            raise ConfigError(f"expected prompts of 1 or more, got {self.prompts}")


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
        """In tokens."""
        return int(self.budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConfig:
    """Which positions rules keep.

    Attributes:
        rules: one picture each.
        tokens: of each text.
        texts: over which is averaged.
        budget: cap as a part of `tokens`.
        every: tokens that leave at a time.
        bins: equal parts of a text.
    """

    rules: tuple[Rule, ...] = RULES
    tokens: int = 1_024
    texts: int = 8
    budget: float = 0.25
    every: int = 32
    bins: int = 32

    @property
    def cap(self) -> int:
        """In tokens."""
        return int(self.budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Configuration of the cost part: time that eviction adds to decode steps.

    Attributes:
        model: a name in SHAPES; its weights are random.
        rule: the measured eviction policy.
        cap, every: cap and eviction interval in tokens; prompts are as long as the cap.
        rows: rows that decode together.
        repeats: rounds of all variants, of `every` steps each, after one that is not counted.
    """

    model: str = "125m"
    rule: Rule = field(default_factory=lambda: Rule("average"))
    cap: int = 1_024
    every: int = 64
    rows: int = 32
    repeats: int = 5


SMALL_LAYERS = CostConfig(model="small", cap=64, every=32, repeats=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionBenchConfig:
    """All of it.

    Attributes:
        model: that reads and answers: a folder, a hub name or quire-tiny.
        quality, perplexity, kept, cost, ready: the parts.
    """

    model: str = "quire-tiny"
    quality: CellsConfig = field(default_factory=CellsConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    kept: KeptConfig = field(default_factory=KeptConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    ready: CostConfig = field(default_factory=lambda: SMALL_LAYERS)


QUICK_EVICTION = EvictionBenchConfig(
    quality=CellsConfig(tasks=("lines", "niah"), budgets=(0.25,), tokens=256, prompts=10),
    perplexity=PerplexityConfig(tokens=512, texts=2),
    kept=KeptConfig(tokens=256, texts=1, every=16, bins=16),
    cost=CostConfig(model="small", cap=128, every=16, rows=8, repeats=1),
    ready=CostConfig(model="small", cap=32, every=4, rows=2, repeats=1),
)
