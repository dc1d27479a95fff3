"""`python -m benchmarks batch-plan`: compare `quire plan --maximize-batch` with measured runs."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads
from benchmarks.common.models import random_model
from benchmarks.common.workload import SHAPES
from quire.cli.common import use_threads
from quire.cli.plan_maximize import BatchQuestion, BatchReport, Stopwatch, batch_report
from quire.cli.report import envelope, print_json
from quire.cli.tables import show_table
from quire.errors import UnknownName
from quire.models.loader import LoadedModel
from quire.plan.batch_verdict import RunSeconds
from quire.profile.ceilings import THOROUGH_PROFILE
from quire.profile.step_rates import RunShape, static_engine, timed_steps


def run_batch(model: LoadedModel, shape: RunShape, kv_bytes: int) -> RunSeconds:
    """Run a static batch to its end in a KV memory of the given bytes, after a short warm-up.

    Raises:
        InvariantError: the memory does not hold all rows at the same time.
    """
    warm = replace(shape, prompt_tokens=max(1, shape.prompt_tokens // 8), new_tokens=4)
    engine = static_engine(model, shape, kv_bytes)
    for _ in timed_steps(model, warm, engine):
        pass
    prefill_s = decode_s = 0.0
    for time in timed_steps(model, shape, engine):
        if time.step.decodes:
            decode_s += time.seconds
        else:
            prefill_s += time.seconds
    new_tokens = shape.rows * shape.new_tokens
    return RunSeconds(prefill_s=prefill_s, decode_s=decode_s, new_tokens=new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanConfig:
    """Configuration of the prediction and of the runs.

    Attributes:
        model: a name in `benchmarks.common.workload.SHAPES`, with random weights in bfloat16.
        prompt_tokens, new_tokens: tokens of each row's prompt and output.
        cap, every: options of Batch-Max's eviction rule.
        pool: KV memory, in rows of full KV.
        repeats: repeats of each timed batch that rates are fitted to.
    """

    model: str = "125m"
    prompt_tokens: int = 3_584
    new_tokens: int = 512
    cap: int = 896
    every: int = 64
    pool: int = 2
    repeats: int = 3


QUARTER = BatchPlanConfig(prompt_tokens=896, new_tokens=128, cap=224, every=16, repeats=2)


def batch_plan(
    *,
    model: Annotated[str, typer.Option(help="Shape: 125m, small or tiny.")] = "125m",
    pool: Annotated[int, typer.Option(min=1, help="KV memory, in rows of full KV.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="A quarter of all lengths. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run the batches that `quire plan --maximize-batch` finds; compare times.

    Rates are measured first, on short batches. Each eviction variant then runs at its predicted
    batch size in the same KV memory.
    """
    use_threads(threads)
    if model not in SHAPES:
        raise UnknownName("model", model, SHAPES)
    config = replace(QUARTER if quick else BatchPlanConfig(), model=model, pool=pool)
    loaded = random_model(SHAPES[model](), dtype=torch.bfloat16)
    report = _predict(loaded, config)
    measured = _run(loaded, report)
    claims = _compare(report, measured)
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        arms = report.details() | {"measured": {k: asdict(v) for k, v in measured.items()}}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench batch-plan", claims, arms, used, quick=quick))


def _predict(model: LoadedModel, config: BatchPlanConfig) -> BatchReport:
    question = BatchQuestion(
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.new_tokens,
        kv_bytes=config.pool
        * (config.prompt_tokens + config.new_tokens)
        * model.spec.kv_bytes_per_token(2),
        kv_codec="bfloat16",
        cap=str(config.cap),
        every=config.every,
    )
    profile = replace(THOROUGH_PROFILE, step_repeats=config.repeats)
    timed = Stopwatch(lambda: model, config=profile)
    return batch_report(model.spec, question, timed)


def _run(model: LoadedModel, report: BatchReport) -> dict[str, RunSeconds]:
    question = report.question
    return {
        arm.arm: run_batch(
            model,
            RunShape(
                rows=arm.rows,
                prompt_tokens=question.prompt_tokens,
                new_tokens=question.new_tokens,
                evict=arm.evict,
            ),
            question.kv_bytes,
        )
        for arm in report.arms
        if arm.rows
    }


def _compare(report: BatchReport, measured: dict[str, RunSeconds]) -> dict[str, int | float]:
    claims = report.claims()
    rows = []
    for arm in report.arms:
        if arm.arm in measured and arm.seconds is not None:
            found, predicted = measured[arm.arm].tokens_per_s, arm.seconds.tokens_per_s
            claims[f"{arm.arm}_measured_tokens_per_s"] = found
            claims[f"{arm.arm}_predicted_over_measured"] = predicted / found
            ratio = f"{predicted / found:.2f}"
            rows.append((arm.arm, f"{arm.rows}", f"{found:,.1f}", f"{predicted:,.1f}", ratio))
    columns = ("variant", "batch", "tokens/s", "predicted tokens/s", "predicted / measured")
    show_table("Recommended batches", columns, rows)
    return claims
