"""Configurations of the KVCrush benchmark, at full size and small."""

from dataclasses import dataclass, field, replace

from benchmarks.common.workload import SHAPES
from benchmarks.eviction.config import TASKS, CellsConfig
from benchmarks.eviction.rules import Rule
from quire.errors import ConfigError
from quire.layout.eviction import PREFILL_AND_DECODE, PREFILL_END
from quire.policies.signatures.anchors import ALTERNATING, FARTHEST, MEAN, ONES, RANDOM, ZEROS

BASES = tuple(map(Rule, ("h2o", "average", "snapkv", "expected_attention")))
SWEPT_TASKS = ("lines", "kv", "niah", "facts")
"""Tasks of `TASKS` on which rules differ: all rules do well on `labels` and badly on `copy`."""

CLAIMED = ("bases", "pages")
HEADS = "heads"
SWEEPS = (
    *("paper", "shares", "additive", "anchors", "granularity", "forms", "schedule", "budgets"),
)


_PAPER_PROMPT_TOKENS = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig:
    """The page-level setting of the paper's table I, with a divisor.

    Attributes:
        initial, middle, recent: numbers of tokens.
        page_tokens: slots in a page.
        divisor: divisor of all these numbers; 1: the paper's setting.
    """

    initial: int = 32
    middle: int = 512
    recent: int = 128
    page_tokens: int = 32
    divisor: int = 4

    def __post_init__(self) -> None:
        for number in (self.initial, self.middle, self.recent, self.page_tokens):
            if number % self.divisor:
                raise ConfigError(f"expected a divisor of {number} tokens, got {self.divisor}")

    def scaled(self, tokens: int) -> int:
        """A number of tokens after division."""
        return tokens // self.divisor

    @classmethod
    def for_prompts(cls, tokens: int) -> "PaperConfig":
        """Setting whose retained tokens are at most about a third of a prompt."""
        made = cls(divisor=1)
        while made.divisor * tokens < _PAPER_PROMPT_TOKENS and made.divisor < made.page_tokens:
            made = cls(divisor=2 * made.divisor)
        return made

    @property
    def cap(self) -> int:
        """Number of retained tokens."""
        return self.scaled(self.initial + self.middle + self.recent)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """A base configuration, and changes of one option at a time.

    Attributes:
        tables: names of the tables; see `benchmarks.kvcrush.arm_tables`.
        bases: base rules, run with and without KVCrush.
        pyramid: base rule that also runs with a pyramid budget.
        swept: base rules of the tables that change one option.
        tasks: tasks of `quire.evals`.
        tokens: most tokens of a prompt with its output.
        prompts: number of prompts of each cell.
        budget: cap as a fraction of `tokens`; 0.25 is 4 x compression.
        other_budgets: budgets of the table `budgets`.
        share: fraction of the budget for representatives.
        shares: fractions of the table `shares`.
        anchors, several, several_kinds: single anchors; numbers of several anchors; their kinds.
        chunk_tokens: number of neighbouring tokens that are evicted together.
        blocks: pages that OpenVINO's form adds; its cap is lowered by as many.
        paper: setting of the paper's table I; all tables use its pages.
        when: eviction schedule.
        other_when: schedule of the table `schedule`.
        every: number of tokens evicted at once, for schedules with repeated evictions.
        rows: most running requests.
        cache: most bytes of prompts that stay cached for the next rules.
    """

    tables: tuple[str, ...] = CLAIMED
    bases: tuple[Rule, ...] = BASES
    pyramid: Rule = Rule("snapkv")  # noqa: RUF009 - frozen
    swept: tuple[Rule, ...] = (Rule("h2o"), Rule("snapkv"))
    tasks: tuple[str, ...] = TASKS
    tokens: int = 512
    prompts: int = 100
    budget: float = 0.25
    other_budgets: tuple[float, ...] = (0.5, 0.125)
    share: float = 0.25
    shares: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
    anchors: tuple[str, ...] = (MEAN, RANDOM, ALTERNATING, ZEROS, ONES)
    several: tuple[int, ...] = (2, 4, 8)
    several_kinds: tuple[str, ...] = (RANDOM, MEAN, FARTHEST)
    chunk_tokens: int = 8
    blocks: int = 2
    paper: PaperConfig = field(default_factory=PaperConfig)
    when: str = PREFILL_END
    other_when: str = PREFILL_AND_DECODE
    every: int = 16
    rows: int = 32
    cache: int = 4 << 30

    def __post_init__(self) -> None:
        _ = self.cells  # raises for invalid budgets and prompts

    @property
    def cells(self) -> CellsConfig:
        """The shared values, validated by `CellsConfig`."""
        return CellsConfig(
            budgets=(self.budget, *self.other_budgets),
            tasks=self.tasks,
            tokens=self.tokens,
            prompts=self.prompts,
            every=self.every,
            rows=self.rows,
        )

    @property
    def page_tokens(self) -> int:
        """Slots in a page."""
        return self.paper.scaled(self.paper.page_tokens)

    def cap(self, budget: float) -> int:
        """Cap in tokens."""
        return int(budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityConfig:
    """Texts that are processed and continued with a cap.

    Attributes:
        name: name in tables and claims.
        bases: base rules, run with and without KVCrush.
        pyramid: base rule that also runs with a pyramid budget; None: no such rule.
        share: fraction of the budget for representatives.
        tokens: length of each text.
        texts: number of texts.
        new_tokens: length of each continuation.
        cap: cap in tokens.
        every: number of tokens that are evicted, and then processed, at once.
        page_tokens: slots in a page.
        blocks: pages that OpenVINO's form adds; its cap is lowered by as many; 0: omit that form.
    """

    name: str = "fidelity"
    bases: tuple[Rule, ...] = BASES
    pyramid: Rule | None = None
    share: float = 0.25
    tokens: int = 1_024
    texts: int = 16
    new_tokens: int = 64
    cap: int = 256
    every: int = 32
    page_tokens: int = 8
    blocks: int = 2


LONG = FidelityConfig(
    name="long",
    bases=(Rule("h2o"), Rule("snapkv")),
    pyramid=Rule("snapkv"),
    tokens=4_032,
    texts=6,
    cap=2_048,
    every=128,
    blocks=0,
)
"""The paper's other budget: 2,048 tokens, with a static quarter for representatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    """Recorded prompts in the page-level setting of the paper's table I.

    Attributes:
        tokens: most tokens of a prompt; shots are dropped until it fits, then it is truncated.
        prompts: number of prompts of each file of examples.
        new_tokens: tokens of each output.
        paper: caps and pages.
        shares: fractions of the budget for representatives, in the order of the paper's splits.
        anchors: anchors of the paper.
    """

    tokens: int = 1_344
    prompts: int = 8
    new_tokens: int = 64
    paper: PaperConfig = field(default_factory=lambda: PaperConfig(divisor=1))
    shares: tuple[float, ...] = (0.75, 0.25)
    anchors: tuple[str, ...] = (RANDOM, MEAN, ALTERNATING)

    @property
    def min_tokens(self) -> int:
        """Prompts must be longer than this, so that a large part of each exceeds the cap."""
        return (self.paper.cap + self.tokens) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """Time of selecting representatives in a run, with random weights.

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
    base: Rule = Rule("h2o")  # noqa: RUF009 - frozen
    rows: int = 16
    prompt_tokens: int = 1_024
    new_tokens: int = 512
    cap: int = 672
    every: int = 64
    share: float = 0.25
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise ConfigError(f"expected one of {', '.join(SHAPES)}, got {self.model!r}")


def heads_of(config: QualityConfig) -> QualityConfig:
    """The part `heads`: a retained set per KV head, at the budget and at the first other one."""
    return replace(
        config, tables=(HEADS,), tasks=SWEPT_TASKS, other_budgets=config.other_budgets[:1]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCrushBenchConfig:
    """Configuration of all parts.

    Attributes:
        model: evaluated model: a folder, a hub name or quire-tiny.
        quality, heads, sweeps, fidelity, long, prompts, overhead: configurations of the parts.
    """

    model: str = "quire-tiny"
    quality: QualityConfig = field(default_factory=QualityConfig)
    heads: QualityConfig = field(default_factory=lambda: heads_of(QualityConfig()))
    sweeps: QualityConfig = field(
        default_factory=lambda: QualityConfig(tables=SWEEPS, tasks=SWEPT_TASKS, prompts=50)
    )
    fidelity: FidelityConfig = field(default_factory=FidelityConfig)
    long: FidelityConfig = LONG
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    overhead: OverheadConfig = field(default_factory=OverheadConfig)


_QUICK_BASES = (Rule("h2o"), Rule("snapkv:window=16"))
_QUICK_QUALITY = QualityConfig(
    bases=_QUICK_BASES,
    pyramid=Rule("snapkv:window=16"),
    swept=(Rule("h2o"),),
    tasks=("lines", "kv"),
    tokens=256,
    prompts=10,
    other_budgets=(0.5,),
    shares=(0.0, 0.25, 0.75),
    anchors=(MEAN, RANDOM),
    several=(2,),
    several_kinds=(FARTHEST,),
    chunk_tokens=4,
    paper=PaperConfig(divisor=8),
)
QUICK_KVCRUSH = KVCrushBenchConfig(
    quality=_QUICK_QUALITY,
    heads=replace(heads_of(_QUICK_QUALITY), tasks=_QUICK_QUALITY.tasks),
    sweeps=replace(_QUICK_QUALITY, tables=SWEEPS),
    fidelity=FidelityConfig(
        bases=_QUICK_BASES, tokens=256, texts=2, new_tokens=16, cap=64, every=16, page_tokens=4
    ),
    long=replace(LONG, tokens=512, texts=1, new_tokens=16, cap=256, every=32),
    prompts=PromptsConfig(
        tokens=672, prompts=1, new_tokens=16, paper=PaperConfig(divisor=2), anchors=(MEAN,)
    ),
    overhead=OverheadConfig(
        model="small", rows=4, prompt_tokens=256, new_tokens=64, cap=168, every=16
    ),
)
