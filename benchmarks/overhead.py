"""`python -m benchmarks overhead`: fraction of a decode step spent on bookkeeping.

Bookkeeping is the scheduler, page tables and the flat batch.
"""

import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads
from benchmarks.common.models import llama_125m, random_model
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """The workload.

    Attributes:
        rows: sequences that decode together.
        prompt_tokens: length of each sequence when the measurement begins.
        repeats: groups of steps measured.
        steps: decode steps in a group.
    """

    rows: int = 256
    prompt_tokens: int = 512
    repeats: int = 5
    steps: int = 4


def measure_overhead(config: OverheadConfig) -> Iterator[dict[str, float]]:
    """Decode with the 125M random model in bfloat16; yield one result for each group of steps.

    A result has `step_s` (without sampling), `schedule_s`, `prepare_s`, and `share`: the sum of the
    last two over `step_s`.
    """
    engine = _filled_engine(config)
    for _ in range(config.repeats):
        before = engine.stats().times
        for _ in range(config.steps):
            engine.step()
        after = engine.stats().times
        step_s = (after.steps_s - before.steps_s) / config.steps
        schedule_s = (after.schedule_s - before.schedule_s) / config.steps
        prepare_s = (after.prepare_s - before.prepare_s) / config.steps
        yield {
            "step_s": step_s,
            "schedule_s": schedule_s,
            "prepare_s": prepare_s,
            "share": (schedule_s + prepare_s) / step_s,
        }


def _filled_engine(config: OverheadConfig) -> Engine:
    """Create an engine whose rows have all finished prefill and started to decode."""
    model = random_model(llama_125m(), dtype=torch.bfloat16)
    new_tokens = config.repeats * config.steps + 2 * config.rows
    kv_bytes = model.spec.kv_bytes_per_token(2) * (config.prompt_tokens + new_tokens) * config.rows
    engine = Engine(
        model,
        KVConfig(memory=kv_bytes),
        ScheduleConfig(max_num_seqs=config.rows),
    )
    rng = random.Random(0)
    for _ in range(config.rows):
        prompt = [rng.randrange(model.spec.vocab_size) for _ in range(config.prompt_tokens)]
        engine.submit(
            GenerationRequest(prompt, SamplingParams(max_tokens=new_tokens, temperature=0.0))
        )
    while any(r.num_uncomputed > 1 for r in engine.scheduler.running) or engine.stats().num_waiting:
        engine.step()
    return engine


def overhead(
    *,
    rows: Annotated[int, typer.Option(min=1, help="Number of decoding sequences.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    quick: Annotated[
        bool, typer.Option("--quick", help="An eighth of the rows and of the lengths. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the fraction of a decode step spent on bookkeeping outside the model."""
    use_threads(threads)
    config = OverheadConfig(rows=rows, prompt_tokens=prompt_tokens)
    if quick:
        config = replace(config, rows=max(1, rows // 8), prompt_tokens=max(1, prompt_tokens // 8))
    results = []
    for result in measure_overhead(config):
        results.append(result)
        typer.echo(
            f"step {result['step_s'] * 1e3:.1f} ms, schedule {result['schedule_s'] * 1e3:.2f} ms, "
            f"prepare {result['prepare_s'] * 1e3:.2f} ms: {result['share']:.2%} bookkeeping"
        )
    claims = {"bookkeeping_share": statistics.median(result["share"] for result in results)}
    typer.echo(f"bookkeeping takes {claims['bookkeeping_share']:.2%} of a step (median)")
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        arms = {"overhead": results}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench overhead", claims, arms, used, quick=quick))
