"""The arithmetic behind `quire plan --maximize-batch`: which batches fit, and how fast they are."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from quire.errors import ConfigError
from quire.eviction.eviction_rules import EvictionRules
from quire.kv.memory import KVMemory
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.kv_format import without_records
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.plan.batch_verdict import (
    BOTH_PHASES,
    DECODE_ONLY,
    EXTREME,
    FULL,
    ArmBatch,
    BlockVerdict,
    arm_rules,
    judge_blocks,
)
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.rates import StepRates, model_key, steps_key
from quire.plan.static_run import RunSeconds, row_steps, run_seconds
from quire.scheduler.admission.batches import rows_at_once
from quire.scheduler.admission.need import Need
from quire.scheduler.admission.peaks import Peaks

LABELS = {
    FULL: "full KV",
    DECODE_ONLY: "decode only, to the cap",
    EXTREME: "decode only, 2 tokens",
    BOTH_PHASES: "prefill and decode",
}

Rates = Callable[[str], StepRates | NotUsable]
"""Gives the step rates of a rule, or says why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQuestion:
    """What is asked.

    Attributes:
        prompt_tokens, new_tokens: of each row.
        kv_bytes: KV memory.
        kv_codec: format of keys and values.
        page_tokens: slots of a page.
        evict: the rule; None: Batch-Max's own.
        cap: in place of the rule's.
        every: likewise.
        batch: rows wanted, if they are fixed.
    """

    prompt_tokens: int
    new_tokens: int
    kv_bytes: int
    kv_codec: str
    page_tokens: int = 16
    evict: str | None = None
    cap: str | None = None
    every: int | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """One way of evicting.

    Attributes:
        arm: one of `batch_verdict.ARMS`.
        evict: as `--evict` takes it.
        rows: that run side by side.
        row_bytes: KV of a row at its peak, in whole pages, statistics included.
        held_tokens: most tokens of a lane.
        seconds: predicted, of a batch of so many rows; None where nothing was measured.
        missing: why there is no prediction; empty where there is one.
    """

    arm: str
    evict: str
    rows: int
    row_bytes: int
    held_tokens: int
    seconds: RunSeconds | None = None
    missing: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens a second, prefill counted."""
        return None if self.seconds is None else self.seconds.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The answer of `quire plan --maximize-batch`.

    Attributes:
        question: what was asked.
        arms: by arm.
        verdict: whether evicting while prompts are read pays.
    """

    question: BatchQuestion
    arms: tuple[ArmPlan, ...]
    verdict: BlockVerdict

    @property
    def missing(self) -> tuple[str, ...]:
        """Why there are no predictions, each reason once."""
        return tuple(dict.fromkeys(arm.missing for arm in self.arms if arm.missing))

    def claims(self) -> dict[str, int | float]:
        """The numbers, flat; what was not measured is not there."""
        numbers: dict[str, int | float] = {}
        for arm in self.arms:
            numbers[f"{arm.arm}_batch"] = arm.rows
            numbers[f"{arm.arm}_row_bytes"] = arm.row_bytes
            if arm.seconds is not None:
                numbers[f"{arm.arm}_tokens_per_s"] = arm.seconds.tokens_per_s
        if self.verdict.pays is not None:
            numbers["prefill_and_decode_pays"] = int(self.verdict.pays)
        return numbers

    def details(self) -> dict[str, object]:
        """The parts, nested."""
        return {"batches": [asdict(arm) for arm in self.arms], "verdict": asdict(self.verdict)}


def batch_report(model: ModelSpec, question: BatchQuestion, rates: Rates) -> BatchReport:
    """Count and predict every arm.

    Args:
        model: the shape.
        question: what is asked.
        rates: of steps, by rule.

    Raises:
        ConfigError: a rule that cannot be, a row over the model's context, or a memory that holds
            not one token.
    """
    held = question.prompt_tokens + question.new_tokens
    if held > model.max_positions:
        raise ConfigError(
            f"rows of {held:,} tokens exceed the model's context of {model.max_positions:,}; lower "
            "the lengths of --maximize-batch"
        )
    texts = arm_rules(question.evict, cap=question.cap, every=question.every)
    counted = [_counted(model, question, arm, text) for arm, text in texts.items()]
    # behind all refusals: rates may be measured only now
    arms = tuple(_predicted(question, arm, spec, rates) for arm, spec in counted)
    spec = next(spec for arm, spec in counted if arm.arm == BOTH_PHASES)
    verdict = judge_blocks(
        [ArmBatch(arm=a.arm, rows=a.rows, tokens_per_s=a.tokens_per_s) for a in arms],
        cap=spec.least_cap,
        prompt_tokens=question.prompt_tokens,
        new_tokens=question.new_tokens,
        batch=question.batch,
    )
    return BatchReport(question=question, arms=arms, verdict=verdict)


def _rules(model: ModelSpec, question: BatchQuestion, evict: str, codec: str) -> EvictionRules:
    return EvictionRules(evict, "none", model=model, page_tokens=question.page_tokens, codec=codec)


def _counted(
    model: ModelSpec, question: BatchQuestion, arm: str, evict: str
) -> tuple[ArmPlan, EvictionSpec]:
    # what keeps everything, or chooses by no score, finds no token important
    unscored = arm in (FULL, EXTREME)
    codec = without_records(question.kv_codec) if unscored else question.kv_codec
    rules = _rules(model, question, evict, codec)
    prompt_tokens = question.prompt_tokens
    tokens = prompt_tokens + question.new_tokens - 1  # the last one is never processed
    eviction = rules.default.for_request(prompt_tokens, rules.lanes_of(rules.default))
    spec = eviction.spec
    # a row that never passes its cap remembers nothing
    held = KEEP_ALL if eviction.keeps_all(prompt_tokens, tokens) else spec
    layout = layout_for(
        model,
        codec=codec,
        page_tokens=question.page_tokens,
        evicting=rules.evicts,
        heads_apart=rules.heads_apart,
        statistics=rules.statistics,
    )
    memory = KVMemory(layout, question.kv_bytes, 1)
    need = Need(tokens, prompt_tokens, held)
    first_tokens = next(row_steps(spec, prompt_tokens, question.new_tokens)).new
    plan = ArmPlan(
        arm=arm,
        evict=evict,
        rows=rows_at_once(memory, need, first_tokens=first_tokens, chunk_tokens=first_tokens),
        row_bytes=Peaks(memory, first_tokens).peak_bytes(need),
        held_tokens=spec.peak_tokens(need.tokens, prompt_tokens),
    )
    return plan, spec


def _predicted(question: BatchQuestion, arm: ArmPlan, spec: EvictionSpec, rates: Rates) -> ArmPlan:
    found = rates(arm.evict)
    if isinstance(found, NotUsable):
        return replace(arm, missing=found.reason)
    if not arm.rows:
        return arm
    steps = row_steps(spec, question.prompt_tokens, question.new_tokens)
    return replace(arm, seconds=run_seconds(found, steps, arm.rows))


def stored_rates(ceilings: Ceilings | NotUsable, model: ModelSpec, *, dtype: str) -> Rates:
    """Rates that `quire profile` stored for a model on this machine's processor."""

    def rates(evict: str) -> StepRates | NotUsable:
        if isinstance(ceilings, NotUsable):
            return ceilings
        key = steps_key(model_key(model, dtype=dtype, device="cpu"), evict)
        rule = key.rpartition("; ")[2]
        again = f"steps of this model with {rule} were not measured: run `quire profile MODEL"
        return ceilings.steps.get(key) or NotUsable(f"{again} --evict {rule}`")

    return rates
