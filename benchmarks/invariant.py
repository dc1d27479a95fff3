"""`python -m benchmarks invariant`: the cost of `--batch-invariant`, with both arms in turn."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads, quick_option
from benchmarks.common.models import random_model
from benchmarks.common.workload import Workload
from benchmarks.throughput.arms import ArmResult, QuireArm
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
from quire.cli.tables import show_table

PLAIN, INVARIANT = "plain", "invariant"
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantConfig:
    """Configuration of the comparison.

    Attributes:
        model: a name in SHAPES.
        rows: number of sequences of each workload.
        prompt_tokens, new_tokens: tokens of each prompt and of each output.
        repeats: measured rounds of both arms, after one warm-up round.
    """

    model: str = "125m"
    rows: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 512
    new_tokens: int = 32
    repeats: int = 5

    def workload(self, rows: int) -> Workload:
        """Workload of the given number of sequences."""
        return Workload(
            model=self.model,
            prompts=rows,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
        )


QUICK_INVARIANT = InvariantConfig(
    model="tiny", rows=(1, 4), prompt_tokens=40, new_tokens=4, repeats=2
)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of one run.

    Attributes:
        rows: number of sequences.
        arm: PLAIN or INVARIANT.
        prefill: prompt tokens per second, until each sequence has its first token.
        decode: generated tokens per second, after the first tokens.
    """

    rows: int
    arm: str
    prefill: float
    decode: float

    @classmethod
    def of(cls, arm: str, workload: Workload, result: ArmResult) -> "Speeds":
        """Speeds of a timed run."""
        rows, decode_s = workload.prompts, result.total_s - result.prefill_s
        decoded = rows * (workload.new_tokens - 1)
        prefilled = rows * workload.prompt_tokens
        return cls(rows, arm, prefilled / result.prefill_s, decoded / decode_s)


def measure_invariant(config: InvariantConfig) -> Iterator[Speeds]:
    """Run both arms in turn, round by round, for each workload, in bfloat16."""
    shape = config.workload(1).shape()
    # the option changes a model permanently: each arm has a model of its own
    models = {arm: random_model(shape, dtype=torch.bfloat16) for arm in (PLAIN, INVARIANT)}
    for rows in config.rows:
        workload = config.workload(rows)
        arms = {
            name: QuireArm(model, workload, batch_invariant=name == INVARIANT)
            for name, model in models.items()
        }
        for number in range(config.repeats + 1):
            for name, arm in arms.items():
                speeds = Speeds.of(name, workload, arm.run())
                if number:
                    yield speeds


def summarise(found: Sequence[Speeds]) -> dict[str, float]:
    """Median tokens per second of both arms, and the median over rounds of their ratio."""
    claims: dict[str, float] = {}
    for rows in dict.fromkeys(one.rows for one in found):
        for phase in PHASES:
            speeds = {
                arm: [getattr(one, phase) for one in found if (one.rows, one.arm) == (rows, arm)]
                for arm in (PLAIN, INVARIANT)
            }
            for arm, numbers in speeds.items():
                claims[f"{arm}_{phase}_tokens_per_s_{rows}"] = statistics.median(numbers)
            ratios = [
                one / other for one, other in zip(speeds[INVARIANT], speeds[PLAIN], strict=True)
            ]
            claims[f"invariant_over_plain_{phase}_{rows}"] = statistics.median(ratios)
    return claims


def invariant(
    *,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Generated tokens per prompt.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    quick: Annotated[bool, quick_option("A tiny model and short prompts.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare the speed of 1, 8 and 32 sequences with and without --batch-invariant."""
    use_threads(threads)
    config = replace(
        InvariantConfig(), prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    if quick:
        config = QUICK_INVARIANT
    found = []
    for speeds in measure_invariant(config):
        found.append(speeds)
        typer.echo(
            f"{speeds.rows:3d} rows, {speeds.arm:9s}: prefill {speeds.prefill:9.1f} tokens/s, "
            f"decode {speeds.decode:8.1f} tokens/s"
        )
    claims = summarise(found)
    table = [
        (f"{rows}", *(f"{claims[f'invariant_over_plain_{phase}_{rows}']:.2f}" for phase in PHASES))
        for rows in config.rows
    ]
    show_table("Speed with --batch-invariant over speed without", ("rows", *PHASES), table)
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        used = asdict(config) | {"threads": torch.get_num_threads()}
        arms = {"rounds": [asdict(speeds) for speeds in found]}
        print_json(envelope("bench invariant", claims, arms, used, quick=quick))
