"""Arms of the KVCrush benchmark: eviction rules with and without KVCrush, at equal budgets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.kvcrush.config import QualityConfig
from benchmarks.quality.rules import Rule

PAGES = "granularity=page"
PYRAMID = "budget=pyramid"
CRUSH, OPENVINO = "kvcrush", "kvcrush_openvino"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An eviction rule with a cap and a schedule.

    Attributes:
        rule: rule without cap and schedule.
        cap: cap in tokens; tokens that the rule adds are not included.
        when: eviction schedule.
    """

    rule: Rule
    cap: int
    when: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A base policy and its KVCrush variants, at equal budgets.

    Attributes:
        alone: the base policy with a retained set per KV head.
        one_set: one retained set for the heads of a layer: KVCrush without representatives.
        crushing: KVCrush.
        openvino: OpenVINO's form; None if it is not measured.
    """

    alone: Arm
    one_set: Arm
    crushing: Arm
    openvino: Arm | None = None

    @property
    def forms(self) -> Iterator[Arm]:
        """KVCrush, and OpenVINO's form if it is measured."""
        yield from (arm for arm in (self.crushing, self.openvino) if arm is not None)


def with_options(rule: Rule, *options: str) -> Rule:
    """Append options to a rule; empty options are omitted."""
    name, _, own = rule.text.partition(":")
    written = ",".join(option for option in (own, *options) if option)
    return Rule(f"{name}:{written}" if written else name)


def around(name: str, base: Rule, *options: str) -> Rule:
    """A rule with another rule as its base."""
    return with_options(Rule(f"{name}:base=({base.text})"), *options)


def crushed(base: Rule, share: float, *options: str) -> Rule:
    """KVCrush with a base rule."""
    return around(CRUSH, base, f"share={share:g}", *options)


def one_set(base: Rule, *options: str) -> Rule:
    """A policy with one retained set for the heads of a layer: KVCrush without representatives."""
    return crushed(base, 0.0, *options)


def compared(
    base: Rule, arm: Arm, share: float, *options: str, openvino_tokens: int = 0, blocks: int = 0
) -> Compared:
    """A base rule and its variants.

    Args:
        base: the base rule.
        arm: cap and schedule; its rule is not used.
        share: fraction of the budget for representatives.
        options: options of every variant.
        openvino_tokens: tokens that OpenVINO's form adds, by which its cap is lowered; 0: omit it.
        blocks: pages that OpenVINO's form adds.
    """
    form = around(OPENVINO, base, f"blocks={blocks}", PAGES)
    return Compared(
        alone=replace(arm, rule=with_options(base, *options)),
        one_set=replace(arm, rule=one_set(base, *options)),
        crushing=replace(arm, rule=crushed(base, share, *options)),
        openvino=replace(arm, rule=form, cap=arm.cap - openvino_tokens) if blocks else None,
    )


def base_arm(config: QualityConfig, rule: Rule, budget: float | None = None) -> Arm:
    """An arm of a rule; None: the configured budget."""
    cap = int((config.budget if budget is None else budget) * config.tokens)
    return Arm(rule=rule, cap=cap, when=config.when)


def by_token(config: QualityConfig) -> tuple[Compared, ...]:
    """Compared arms of all base rules, and of one with a pyramid budget."""
    return tuple(
        compared(base, base_arm(config, base), config.share, option)
        for base, option in config.with_pyramid
    )


def by_page(config: QualityConfig) -> tuple[Compared, ...]:
    """Compared arms of all base rules, with whole pages evicted."""
    return tuple(
        compared(
            base,
            base_arm(config, base),
            config.share,
            PAGES,
            openvino_tokens=config.blocks * config.page_tokens,
            blocks=config.blocks,
        )
        for base in config.bases
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfHeads:
    """A base policy and KVCrush with a retained set per KV head, at a budget in percent.

    Attributes:
        percent: budget in percent.
        alone: the base policy.
        forms: KVCrush with other options, by the label of the form.
    """

    percent: float
    alone: Arm
    forms: Mapping[str, Arm]


BEST, MIDDLE, FEWER = "best", "middle", "best, share 0.1"
HEAD_FORMS: Mapping[str, str] = MappingProxyType(
    {BEST: "pick=best", MIDDLE: "", FEWER: "pick=best"}
)
"""Options of KVCrush with a retained set per KV head, by the label of the form."""
_FEWER_SHARE = 0.1


def of_heads(config: QualityConfig) -> tuple[OfHeads, ...]:
    """Base policies and KVCrush with a retained set per KV head, at all budgets."""

    def form(base: Rule, name: str, option: str) -> Rule:
        share = _FEWER_SHARE if name == FEWER else config.share
        return crushed(base, share, "sets=head", HEAD_FORMS[name], option)

    return tuple(
        OfHeads(
            percent=100 * budget,
            alone=base_arm(config, with_options(base, option), budget),
            forms={name: base_arm(config, form(base, name, option), budget) for name in HEAD_FORMS},
        )
        for budget in config.heads_budgets
        for base, option in config.with_pyramid
    )
