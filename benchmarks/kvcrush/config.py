"""Configurations of the KVCrush benchmark, at full size and small."""

from dataclasses import dataclass, field, replace

from benchmarks.common.command import names_of
from benchmarks.common.models import SHAPES
from benchmarks.quality.cells import TasksConfig
from benchmarks.quality.rules import Rule, parts_of_budgets, rules_of
from benchmarks.quality.texts import TextsConfig
from quire.errors import ConfigError
from quire.evals.tasks import FAMILIES
from quire.layout.eviction import PREFILL_END

BASES = tuple(map(Rule, ("h2o", "average", "snapkv", "expected_attention")))
HEADS_TASKS = ("lines", "kv", "niah", "facts")
"""Tasks on which rules differ: all rules do well on `labels` and badly on `copy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig(TasksConfig):
    """Configuration of the parts `quality` and `heads`.

    Attributes:
        bases: base rules, run with and without KVCrush.
        pyramid: base rule that also runs with a pyramid budget.
        budget: cap as a fraction of `tokens`; 0.25 is 4 x compression.
        heads_budgets: caps of the part `heads`.
        share: fraction of the budget for representatives.
        blocks: pages that OpenVINO's form adds; its cap is lowered by as many.
        page_tokens: slots in a page.
        when: eviction schedule.
        every: number of tokens evicted at once, for schedules with repeated evictions.
        cache: most bytes of prompts that stay cached for the next rules.
    """

    bases: tuple[Rule, ...] = BASES
    pyramid: Rule = Rule("snapkv")  # noqa: RUF009 - frozen
    budget: float = 0.25
    heads_budgets: tuple[float, ...] = (0.25, 0.5)
    share: float = 0.25
    blocks: int = 2
    page_tokens: int = 8
    when: str = PREFILL_END
    every: int = 16
    cache: int = 4 << 30

    @property
    def with_pyramid(self) -> tuple[tuple[Rule, str], ...]:
        """All base rules with an option: no option, then one rule with a pyramid budget."""
        return (*((base, "") for base in self.bases), (self.pyramid, "budget=pyramid"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityConfig(TextsConfig):
    """Texts that are processed and continued with a cap; tokens after the cap are scored.

    Attributes:
        name: name in tables and claims.
        bases: base rules, run with and without KVCrush.
        pyramid: base rule that also runs with a pyramid budget; None: no such rule.
        share: fraction of the budget for representatives.
        first: cap in tokens.
        every: number of tokens that are evicted, and then processed, at once.
        blocks: pages that OpenVINO's form adds; its cap is lowered by as many; 0: omit that form.
    """

    name: str = "fidelity"
    bases: tuple[Rule, ...] = BASES
    pyramid: Rule | None = None
    share: float = 0.25
    new_tokens: int = 64
    first: int = 256
    every: int = 32
    page_tokens: int = 8
    blocks: int = 2


LONG = FidelityConfig(
    name="long",
    bases=(Rule("h2o"), Rule("snapkv")),
    pyramid=Rule("snapkv"),
    tokens=4_032,
    texts=6,
    first=2_048,
    every=128,
    blocks=0,
)
"""The paper's other budget: 2,048 tokens, with a static quarter for representatives."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCrushBenchConfig:
    """Configuration of all parts, and the evaluated model: a folder, a hub name or quire-tiny."""

    model: str = "quire-tiny"
    quality: QualityConfig = field(default_factory=QualityConfig)
    heads: QualityConfig = field(default_factory=lambda: QualityConfig(tasks=HEADS_TASKS))
    fidelity: FidelityConfig = field(default_factory=FidelityConfig)
    long: FidelityConfig = LONG
    overhead: OverheadConfig = field(default_factory=OverheadConfig)


_QUICK_BASES = (Rule("h2o"), Rule("snapkv:window=16"))
_QUICK_QUALITY = QualityConfig(
    bases=_QUICK_BASES,
    pyramid=Rule("snapkv:window=16"),
    tasks=("lines", "kv"),
    tokens=256,
    prompts=10,
    page_tokens=4,
)
QUICK_KVCRUSH = KVCrushBenchConfig(
    quality=_QUICK_QUALITY,
    heads=_QUICK_QUALITY,
    fidelity=FidelityConfig(
        bases=_QUICK_BASES, tokens=256, texts=2, new_tokens=16, first=64, every=16, page_tokens=4
    ),
    long=replace(LONG, tokens=512, texts=1, new_tokens=16, first=256, every=32),
    overhead=OverheadConfig(
        model="small", rows=4, prompt_tokens=256, new_tokens=64, cap=168, every=16
    ),
)


def configured(
    config: KVCrushBenchConfig,
    *,
    bases: str,
    tasks: str,
    budget: str,
    prompts: int | None,
    dtype: str,
) -> KVCrushBenchConfig:
    """Apply the given options; unset options keep each part's own values.

    Raises:
        UnknownName: no such rule or task.
        ConfigError: an invalid budget.
    """

    def quality(part: QualityConfig) -> QualityConfig:
        part = replace(part, prompts=prompts or part.prompts)
        if tasks.strip():
            part = replace(part, tasks=names_of(tasks, FAMILIES, "task"))
        if budget.strip():
            found = parts_of_budgets(budget)
            if len(found) != 1:
                raise ConfigError(f"expected one budget such as 25, got {budget!r}")
            part = replace(part, budget=found[0])
        return part

    config = replace(config, quality=quality(config.quality), heads=quality(config.heads))
    if dtype != "auto":
        config = replace(config, overhead=replace(config.overhead, dtype=dtype))
    if not bases.strip():
        return config
    selected = rules_of(bases)
    first = selected[0]
    return replace(
        config,
        quality=replace(config.quality, bases=selected, pyramid=first),
        heads=replace(config.heads, bases=selected, pyramid=first),
        fidelity=replace(config.fidelity, bases=selected),
        long=replace(config.long, bases=selected, pyramid=first),
        overhead=replace(config.overhead, base=first),
    )
