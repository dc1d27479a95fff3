"""Computes the largest batches and their predicted speed for `quire plan --maximize-batch`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from quire.errors import ConfigError
from quire.evals.tune.predict import predicted_rows
from quire.layout.eviction import EvictionSpec
from quire.layout.kv_format import without_records
from quire.layout.model import ModelSpec
from quire.plan.batch_verdict import (
    BOTH_PHASES,
    DECODE_ONLY,
    EXTREME,
    FULL,
    ArmBatch,
    BlockVerdict,
    RunSeconds,
    arm_rules,
    judge_blocks,
    row_steps,
    run_seconds,
)
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.rates import StepRates, model_key, steps_key

LABELS = {
    FULL: "none (full KV)",
    DECODE_ONLY: "decode, to the cap",
    EXTREME: "decode, to 2 tokens",
    BOTH_PHASES: "prefill and decode",
}
"""Phases in which a variant evicts."""

Rates = Callable[[str], StepRates | NotUsable]
"""Returns the step rates of a rule, or the reason why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQuestion:
    """Input of the computation.

    Attributes:
        prompt_tokens, new_tokens: prompt and output length of each row.
        kv_bytes: size of the KV memory.
        kv_codec: KV codec.
        page_tokens: tokens per page.
        evict: eviction rule; None: the rule of Batch-Max.
        cap: replaces the cap of the rule.
        every: replaces the rule's `every`.
        batch: fixed batch size; None: the largest possible.
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
    """The result for one eviction variant.

    Attributes:
        arm: one of `batch_verdict.ARMS`.
        evict: the rule in the syntax of `--evict`.
        rows: largest batch in rows.
        row_bytes: peak KV of a row, in whole pages, including statistics.
        held_tokens: peak tokens of a lane.
        seconds: predicted times of a batch of `rows` rows; None without measurements.
        missing: reason for a missing prediction; empty if there is a prediction.
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
        """Output tokens per second, including prefill time."""
        return None if self.seconds is None else self.seconds.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The result of `quire plan --maximize-batch`.

    Attributes:
        question: input of the computation.
        arms: results by variant.
        verdict: whether eviction in prefill improves throughput.
    """

    question: BatchQuestion
    arms: tuple[ArmPlan, ...]
    verdict: BlockVerdict

    @property
    def missing(self) -> tuple[str, ...]:
        """Distinct reasons for missing predictions."""
        return tuple(dict.fromkeys(arm.missing for arm in self.arms if arm.missing))

    def claims(self) -> dict[str, int | float]:
        """The results as a flat mapping; without predictions that are missing."""
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
        """The results as nested mappings."""
        return {"batches": [asdict(arm) for arm in self.arms], "verdict": asdict(self.verdict)}


def batch_report(model: ModelSpec, question: BatchQuestion, rates: Rates) -> BatchReport:
    """Compute the largest batch and the predicted speed of every variant.

    Args:
        model: shape of the model.
        question: input of the computation.
        rates: step rates by rule.

    Raises:
        ConfigError: an invalid rule, a row longer than the model's context, or a memory below one
            token.
    """
    held = question.prompt_tokens + question.new_tokens
    if held > model.max_positions:
        raise ConfigError(
            f"rows of {held:,} tokens exceed the model's context of {model.max_positions:,}; lower "
            "the lengths of --maximize-batch"
        )
    texts = arm_rules(question.evict, cap=question.cap, every=question.every)
    counted = [_counted(model, question, arm, text) for arm, text in texts.items()]
    # after all checks: this may measure step rates
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


def _counted(
    model: ModelSpec, question: BatchQuestion, arm: str, evict: str
) -> tuple[ArmPlan, EvictionSpec]:
    # rules without scores promote no token to a higher precision
    unscored = arm in (FULL, EXTREME)
    codec = without_records(question.kv_codec) if unscored else question.kv_codec
    found = predicted_rows(
        model,
        codec=codec,
        evict=evict,
        page_tokens=question.page_tokens,
        kv_bytes=question.kv_bytes,
        prompt_tokens=question.prompt_tokens,
        new_tokens=question.new_tokens,
    )
    plan = ArmPlan(
        arm=arm,
        evict=evict,
        rows=found.rows,
        row_bytes=found.row_bytes,
        held_tokens=found.held_tokens,
    )
    return plan, found.eviction


def _predicted(question: BatchQuestion, arm: ArmPlan, spec: EvictionSpec, rates: Rates) -> ArmPlan:
    found = rates(arm.evict)
    if isinstance(found, NotUsable):
        return replace(arm, missing=found.reason)
    if not arm.rows:
        return arm
    steps = row_steps(spec, question.prompt_tokens, question.new_tokens)
    return replace(arm, seconds=run_seconds(found, steps, arm.rows))


def stored_rates(
    ceilings: Ceilings | NotUsable, model: ModelSpec, *, dtype: str, weight_codec: str = "auto"
) -> Rates:
    """Step rates that `quire profile` stored for a model on this machine."""

    def rates(evict: str) -> StepRates | NotUsable:
        if isinstance(ceilings, NotUsable):
            return ceilings
        key = steps_key(
            model_key(model, dtype=dtype, device="cpu", weight_codec=weight_codec), evict
        )
        rule = key.rpartition("; ")[2]
        why_not = f"steps of this model with {rule} were not measured: run `quire profile MODEL"
        return ceilings.steps.get(key) or NotUsable(f"{why_not} --evict {rule}`")

    return rates
