"""What the KVCrush bench runs, at full size and small."""

from dataclasses import dataclass, field

from quire.bench.eviction.config import TASKS, CellsConfig
from quire.bench.eviction.rules import Rule
from quire.bench.workload import SHAPES
from quire.errors import ConfigError
from quire.policies.signatures.anchors import ALTERNATING, FARTHEST, MEAN, ONES, RANDOM, ZEROS
from quire.spec.eviction import PREFILL_AND_DECODE, PREFILL_END

BASES = tuple(map(Rule, ("h2o", "average", "snapkv", "expected_attention")))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig:
    """The page-level setting of the paper's table I, and by what it is divided.

    Attributes:
        initial, middle, recent: tokens.
        page_tokens: slots of a page.
        divisor: of all of them; 1 is the paper's.
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
        """A number of tokens, divided."""
        return tokens // self.divisor

    @property
    def cap(self) -> int:
        """All that stays."""
        return self.scaled(self.initial + self.middle + self.recent)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """One base configuration, and one thing at a time that is changed.

    Attributes:
        bases: rules, with and without KVCrush around them.
        pyramid: the one that gets a pyramid budget too.
        swept: bases of the tables that change one thing.
        tasks: of `quire.evals`.
        tokens: most of a prompt with its answer.
        prompts: of each cell.
        budget: cap as a part of `tokens`; 0.25 is 4 x compression.
        other_budgets: of a table of its own.
        share: for representatives.
        shares: of a table of its own.
        anchors, several, several_kinds: single anchors; how many; and of which kinds those are.
        chunk_tokens, page_tokens: neighbours that stay or go together.
        blocks: pages that OpenVINO's form adds; its cap is lower by as many.
        paper: the setting of the paper's table I.
        when: the schedule.
        other_when: of a table of its own.
        every: tokens that leave at a time, where they leave more than once.
        rows: requests that run at once.
    """

    bases: tuple[Rule, ...] = BASES
    pyramid: Rule = Rule("snapkv")  # noqa: RUF009 - frozen
    swept: tuple[Rule, ...] = (Rule("h2o"), Rule("snapkv"))
    tasks: tuple[str, ...] = TASKS
    tokens: int = 512
    prompts: int = 200
    budget: float = 0.25
    other_budgets: tuple[float, ...] = (0.5, 0.125)
    share: float = 0.25
    shares: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
    anchors: tuple[str, ...] = (MEAN, RANDOM, ALTERNATING, ZEROS, ONES)
    several: tuple[int, ...] = (2, 4, 8)
    several_kinds: tuple[str, ...] = (RANDOM, MEAN, FARTHEST)
    chunk_tokens: int = 8
    page_tokens: int = 8
    blocks: int = 2
    paper: PaperConfig = field(default_factory=PaperConfig)
    when: str = PREFILL_END
    other_when: str = PREFILL_AND_DECODE
    every: int = 16
    rows: int = 32

    def __post_init__(self) -> None:
        _ = self.cells  # refuses budgets and prompts that cannot be

    @property
    def cells(self) -> CellsConfig:
        """What the judge of cells must know."""
        return CellsConfig(
            budgets=(self.budget, *self.other_budgets),
            tasks=self.tasks,
            tokens=self.tokens,
            prompts=self.prompts,
            every=self.every,
            rows=self.rows,
        )

    def cap(self, budget: float) -> int:
        """In tokens."""
        return int(budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityConfig:
    """Texts read on, and continued, under a cap.

    Attributes:
        bases: rules, with and without KVCrush around them.
        share: for representatives.
        tokens: of each text.
        texts: how many.
        new_tokens: of each continuation.
        budget: cap as a part of `tokens`.
        every: tokens that leave, and are read, at a time.
        page_tokens: of a page, where pages leave.
        blocks: pages that OpenVINO's form adds; its cap is lower by as many.
    """

    bases: tuple[Rule, ...] = BASES
    share: float = 0.25
    tokens: int = 1_024
    texts: int = 24
    new_tokens: int = 64
    budget: float = 0.25
    every: int = 32
    page_tokens: int = 8
    blocks: int = 2

    @property
    def cap(self) -> int:
        """In tokens."""
        return int(self.budget * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """What representatives take of a run's time, with random weights.

    Attributes:
        model: a name in SHAPES.
        base: the rule around which.
        rows: requests that run together.
        prompt_tokens, new_tokens: of each.
        cap, every: of the evictions.
        share: for representatives.
        dtype: of weights and KV.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCrushBenchConfig:
    """All of it.

    Attributes:
        model: that reads and answers: a folder, a hub name or quire-tiny.
        quality, fidelity, overhead: the parts.
    """

    model: str = "quire-tiny"
    quality: QualityConfig = field(default_factory=QualityConfig)
    fidelity: FidelityConfig = field(default_factory=FidelityConfig)
    overhead: OverheadConfig = field(default_factory=OverheadConfig)


_QUICK_BASES = (Rule("h2o"), Rule("snapkv:window=16"))
QUICK_KVCRUSH = KVCrushBenchConfig(
    quality=QualityConfig(
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
        page_tokens=4,
        paper=PaperConfig(divisor=8),
    ),
    fidelity=FidelityConfig(
        bases=_QUICK_BASES, tokens=256, texts=2, new_tokens=16, every=16, page_tokens=4
    ),
    overhead=OverheadConfig(
        model="small", rows=4, prompt_tokens=256, new_tokens=64, cap=168, every=16
    ),
)
