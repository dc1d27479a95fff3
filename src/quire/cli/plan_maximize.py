"""`quire plan --maximize-batch`: options, step rates and output."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.plan_report import PlanReport
from quire.cli.report import envelope, print_json
from quire.errors import ConfigError
from quire.layout.eviction import EvictionSpec
from quire.layout.kv_format import without_records
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size
from quire.layout.values import is_count
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
from quire.plan.ceilings import (
    Ceilings,
    NotUsable,
    default_path,
    read_ceilings,
)
from quire.plan.machine import this_machine
from quire.plan.rates import StepRates, model_key, steps_key


def parse_lengths(text: str) -> tuple[int, int]:
    """Parse `input,output`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(is_count(part) and int(part) for part in parts):
        raise ConfigError(
            f"maximize-batch {text!r}: expected input tokens and output tokens, as in 3584,512"
        )
    return int(parts[0]), int(parts[1])


def maximize(plan: PlanReport, question: "BatchQuestion") -> "BatchReport":
    """Compute the largest batches of a planned model, with the times that a profile stored."""
    import torch  # rules import it; other plans do not need it

    ceilings = read_ceilings(default_path(os.environ), this_machine(torch.get_num_threads()))
    stored = stored_rates(ceilings, plan.model, dtype=plan.dtype, weight_codec=plan.weight_codec)
    return batch_report(plan.model, question, stored)


def show(plan: PlanReport, report: "BatchReport", *, as_json: bool) -> None:
    """Print the result; with `as_json` followed by a line of JSON."""
    from rich.console import Console

    Console().print(render_batches(report, plan.capacity.pool_bytes))
    if as_json:
        used = asdict(report.question) | {"model": plan.model_name, "dtype": plan.dtype}
        arms = report.details() | {"missing": list(report.missing)}
        print_json(envelope("plan --maximize-batch", report.claims(), arms, used))


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
    """Input of the computation."""

    prompt_tokens: int
    new_tokens: int
    kv_bytes: int
    kv_codec: str
    page_tokens: int = 16
    evict: str | None = None  # None: the rule of Batch-Max
    cap: str | None = None  # replaces the cap of the rule
    every: int | None = None  # replaces the rule's `every`
    batch: int | None = None  # None: the largest possible


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """The result for one eviction variant."""

    arm: str  # one of `batch_verdict.ARMS`
    evict: str  # in the syntax of `--evict`
    rows: int  # largest batch
    row_bytes: int  # peak KV of a row, in whole pages, including statistics
    held_tokens: int  # peak tokens of a lane
    seconds: RunSeconds | None = None  # of a batch of `rows` rows; None without measurements
    missing: str = ""  # reason for a missing prediction

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second, including prefill time."""
        return None if self.seconds is None else self.seconds.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The result of `quire plan --maximize-batch`."""

    question: BatchQuestion
    arms: tuple[ArmPlan, ...]
    verdict: BlockVerdict  # whether eviction in prefill improves throughput

    @property
    def missing(self) -> tuple[str, ...]:
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
        return {"batches": [asdict(arm) for arm in self.arms], "verdict": asdict(self.verdict)}


def batch_report(model: ModelSpec, question: BatchQuestion, rates: Rates) -> BatchReport:
    """Compute the largest batch and the predicted speed of every variant."""
    held = question.prompt_tokens + question.new_tokens
    if held > model.max_positions:
        raise ConfigError(
            f"rows of {held:,} tokens exceed the model's context of {model.max_positions:,}; lower "
            "the lengths of --maximize-batch"
        )
    texts = arm_rules(question.evict, cap=question.cap, every=question.every)
    counted = [_counted(model, question, arm, text) for arm, text in texts.items()]
    arms = tuple(_predicted(question, arm, spec, rates) for arm, spec in counted)
    spec = next(spec for arm, spec in counted if arm.arm == BOTH_PHASES)
    verdict = judge_blocks(
        [ArmBatch(arm=a.arm, rows=a.rows, tokens_per_s=a.tokens_per_s) for a in arms],
        cap=spec.min_cap,
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
    from quire.evals.tune.predict import predicted_rows  # imports torch

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
        key = steps_key(
            model_key(model, dtype=dtype, device="cpu", weight_codec=weight_codec), evict
        )
        rule = key.rpartition("; ")[2]
        weights, codec = "", ""
        if weight_codec != "auto":
            weights, codec = f" in {weight_codec}", f" --weight-codec {weight_codec}"
        profile = f"quire profile MODEL{codec} --evict {rule}"
        if isinstance(ceilings, NotUsable):
            return NotUsable(ceilings.reason.replace("quire profile MODEL", profile))
        return ceilings.steps.get(key) or NotUsable(
            f"steps of this model{weights} with {rule} were not measured: run `{profile}`"
        )

    return rates


def render_batches(report: BatchReport, pool_bytes: int) -> RenderableType:
    """Render the whole result for a terminal; `pool_bytes`: the KV memory of whole slabs."""
    requested = report.question
    title = Text(
        f"Largest batch for {requested.prompt_tokens:,} input and {requested.new_tokens:,} output "
        f"tokens in {format_size(pool_bytes)} of KV memory (codec {requested.kv_codec}, "
        f"{requested.page_tokens} tokens per page)",
        style="bold",
    )
    notes = [Text(f"tokens/s: {reason}") for reason in report.missing]
    verdict = verdict_text(report.verdict)
    return Group(title, batches_table(report), _rules_text(report), *notes, verdict)


def batches_table(report: BatchReport) -> Table:
    """Batch size, KV bytes per row and predicted tokens per second."""
    table = Table("eviction in", "batch", "KV per row", "prefill s", "decode s", "tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for arm in report.arms:
        table.add_row(LABELS[arm.arm], f"{arm.rows:,}", format_size(arm.row_bytes), *_times(arm))
    return table


def _rules_text(report: BatchReport) -> Text:
    """The rule of each variant on a separate line, so that no rule is truncated."""
    bound = "a bound on eviction in decode, not a rule for use"
    lines = [
        f"{LABELS[arm.arm]}: " + (bound if arm.arm == EXTREME else f"--evict '{arm.evict}'")
        for arm in report.arms
    ]
    return Text("\n".join(lines), overflow="fold")


def verdict_text(verdict: BlockVerdict) -> Text:
    """Whether eviction in prefill improves throughput, with reasons."""
    text = Text("eviction in prefill improves throughput: ")
    text.append({True: "yes", False: "no", None: "unknown"}[verdict.pays], style="bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}")
    return text


def _times(arm: ArmPlan) -> tuple[str, str, str]:
    found = arm.seconds
    if found is None:
        return "-", "-", "-"
    return f"{found.prefill_s:.2f}", f"{found.decode_s:.2f}", f"{found.tokens_per_s:,.1f}"
