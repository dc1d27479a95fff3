"""Arms of the KVCrush benchmark: eviction rules with and without KVCrush."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.eviction.cells import FULL, CellKey
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.config import PaperConfig, QualityConfig
from quire.policies.eviction import make_eviction

PAGES = "granularity=page"
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

    @property
    def tokens(self) -> int:
        """Most tokens of a lane after a prompt, with the tokens that the rule adds."""
        policy = make_eviction(self.rule.evict(self.cap, 1, self.when)).policy
        return self.cap + (0 if policy is None else policy.added_tokens(self.cap))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A variant in a table.

    Attributes:
        label: label in tables.
        arm: the variant.
        against: the base policy with a retained set per head; None: this variant is itself a
            baseline.
        one_set: the base policy with one retained set for the heads of a layer, as in KVCrush.
    """

    label: str
    arm: Arm
    against: Arm | None = None
    one_set: Arm | None = None

    @property
    def arms(self) -> Iterator[Arm]:
        """The row's arm and the arms it is compared with."""
        yield from (arm for arm in (self.against, self.one_set, self.arm) if arm is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTable:
    """A table of arms.

    Attributes:
        name: name of the table.
        caption: what the table changes.
        rows: rows in table order.
    """

    name: str
    caption: str
    rows: tuple[Row, ...]


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


def base_arm(config: QualityConfig, rule: Rule) -> Arm:
    """An arm of a rule in the base configuration."""
    return Arm(rule=rule, cap=config.cap(config.budget), when=config.when)


def page_arm(config: QualityConfig, rule: Rule) -> Arm:
    """The same by pages; the cap is lowered by the tokens that OpenVINO's form adds."""
    added = config.blocks * config.page_tokens if rule.text.startswith(OPENVINO) else 0
    arm = base_arm(config, with_options(rule, PAGES))
    return replace(arm, cap=arm.cap - added)


def one_set(base: Rule, *options: str) -> Rule:
    """A policy with one retained set for the heads of a layer: KVCrush without representatives."""
    return crushed(base, 0.0, *options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A base policy and its KVCrush variants, at equal budgets.

    Attributes:
        alone: the base policy with a retained set per KV head.
        one_set: one retained set for the heads of a layer: KVCrush without representatives.
        crushing: KVCrush.
        openvino: OpenVINO's form; None if the policy does not evict whole pages.
    """

    alone: Arm
    one_set: Arm
    crushing: Arm
    openvino: Arm | None = None


def by_token(config: QualityConfig) -> tuple[Compared, ...]:
    """Compared arms of all base rules, and of one with a pyramid budget."""
    bases = [(base, "") for base in config.bases] + [(config.pyramid, "budget=pyramid")]
    return tuple(
        Compared(
            alone=base_arm(config, with_options(base, budget)),
            one_set=base_arm(config, one_set(base, budget)),
            crushing=base_arm(config, crushed(base, config.share, budget)),
        )
        for base, budget in bases
    )


def by_page(config: QualityConfig) -> tuple[Compared, ...]:
    """Compared arms of all base rules, with whole pages evicted."""
    return tuple(
        Compared(
            alone=page_arm(config, base),
            one_set=page_arm(config, one_set(base)),
            crushing=page_arm(config, crushed(base, config.share)),
            openvino=page_arm(config, around(OPENVINO, base, f"blocks={config.blocks}")),
        )
        for base in config.bases
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfHeads:
    """A base policy and KVCrush with a retained set per KV head, at a budget.

    Attributes:
        name: name of the base policy.
        percent: budget in percent.
        alone: the base policy.
        forms: KVCrush with other options, by the label of the form.
    """

    name: str
    percent: float
    alone: Arm
    forms: Mapping[str, Arm]


BEST, MIDDLE, FEWER = "best", "middle", "best, share 0.1"
HEAD_FORMS: Mapping[str, str] = MappingProxyType(
    {
        BEST: "pick=best",
        MIDDLE: "",
        FEWER: "pick=best",
    }
)
"""Options of KVCrush with a retained set per KV head, by the label of the form."""
_FEWER_SHARE = 0.1


def of_heads(config: QualityConfig) -> tuple[OfHeads, ...]:
    """Base policies and KVCrush with a retained set per KV head, at all budgets."""
    bases = [(base, "") for base in config.bases] + [(config.pyramid, "budget=pyramid")]
    return tuple(
        OfHeads(
            name=with_options(base, budget_option).name,
            percent=100 * budget,
            alone=_at(config, with_options(base, budget_option), budget),
            forms={
                form: _at(config, _crushed_heads(config, base, form, budget_option), budget)
                for form in HEAD_FORMS
            },
        )
        for budget in (config.budget, *config.other_budgets)
        for base, budget_option in bases
    )


def _crushed_heads(config: QualityConfig, base: Rule, form: str, budget_option: str) -> Rule:
    share = _FEWER_SHARE if form == FEWER else config.share
    return crushed(base, share, "sets=head", HEAD_FORMS[form], budget_option)


def _at(config: QualityConfig, rule: Rule, budget: float) -> Arm:
    return replace(base_arm(config, rule), cap=config.cap(budget))


def paper_base(paper: PaperConfig) -> Rule:
    """H2O with protected first and newest tokens; a page's score is the sum over its tokens."""
    sinks, recent = paper.scaled(paper.initial), paper.scaled(paper.recent)
    return Rule(f"h2o:sinks={sinks},recent={recent}")


def paper_rows(
    paper: PaperConfig, when: str, shares: Sequence[float], anchors: Sequence[str]
) -> tuple[Row, ...]:
    """H2O and KVCrush as in the paper's tables I and II, with its pages, splits and anchors."""
    base = paper_base(paper)

    def variant(rule: Rule) -> Arm:
        return Arm(rule=with_options(rule, PAGES), cap=paper.cap, when=when)

    alone, shared = variant(base), variant(one_set(base))
    rows = [
        Row(label="H2O, one set per head", arm=alone),
        Row(label="H2O, one set per layer (the paper's)", arm=shared, against=alone),
    ]
    for share in shares:
        for anchor in anchors:
            label = f"KVCrush {100 * (1 - share):.0f}/{100 * share:.0f}, {anchor}"
            arm = variant(crushed(base, share, f"anchor={anchor}"))
            rows.append(Row(label=label, arm=arm, against=alone, one_set=shared))
    return tuple(rows)


def full_key(config: QualityConfig, task: str, model: str, commit: str | None) -> CellKey:
    """Key of the cell with full KV."""
    return CellKey(
        model=model,
        task=task,
        tokens=config.tokens,
        prompts=config.prompts,
        rule=FULL,
        when="",
        budget=1.0,
        evict=FULL,
        commit=commit,
        page_tokens=config.page_tokens,
    )


def key_of(config: QualityConfig, arm: Arm, task: str, model: str, commit: str | None) -> CellKey:
    """Key of the cell of an arm and a task."""
    return replace(
        full_key(config, task, model, commit),
        rule=arm.rule.text,
        when=arm.when,
        budget=arm.cap / config.tokens,
        evict=arm.rule.evict(arm.cap, config.every, arm.when),
    )
