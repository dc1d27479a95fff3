"""Part `quality`: graded outputs and throughput of the arms, from the same runs.

A model with trained weights runs all prompts of all tasks with every arm, in static batches as
large as one KV memory allows. Quality over full KV is the mean, over all tasks, of an arm's score
divided by full KV's score.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from benchmarks.batch_max.arms import FKV, EvictionArm, bm_name, decode_name
from benchmarks.batch_max.config import QualityConfig
from benchmarks.batch_max.running import batch_sizes, largest_of, rows_that_fit
from benchmarks.common.decoding import generate_all
from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, InvariantError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt
from quire.profile.step_rates import static_schedule

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Results of all prompts of one task under one variant.

    Attributes:
        task: name of the task.
        arm: name of the variant.
        batch: rows that started together.
        score: mean grade, 0 to 1.
        samples: number of prompts.
        total_s: time of all batches, including prefill.
        new_tokens: generated tokens.
        peak_bytes: peak KV memory in use.
        preemptions: preempted rows; their recompute time is part of `total_s`.
    """

    task: str
    arm: str
    batch: int
    score: float
    samples: int
    total_s: float
    new_tokens: int
    peak_bytes: int
    preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time."""
        return self.new_tokens / self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as token ids, with its grading function."""

    tokens: tuple[int, ...]
    graded: GradedPrompt


def judge(
    model: LoadedModel,
    prompts: Sequence[Encoded],
    kv: KVConfig,
    *,
    task: str,
    arm: str,
    batch: int,
    new_tokens: int,
) -> Judged:
    """Run and grade all prompts of a task in batches of `batch` rows.

    Raises:
        InvariantError: the rows of a batch did not all run at the same time.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    engine = Engine(model, kv, static_schedule(batch, longest))
    grades: list[float] = []
    total_s, preemptions = 0.0, 0
    for start in range(0, len(prompts), batch):
        together = prompts[start : start + batch]
        done = generate_all(engine, [prompt.tokens for prompt in together], new_tokens)
        if done.rows_peak != len(together):
            raise InvariantError(
                f"expected {len(together)} rows to run at the same time, got {done.rows_peak}"
            )
        total_s, preemptions = total_s + done.total_s, preemptions + done.preemptions
        texts = [_text_of(model, answer) for answer in done.answers]
        grades += [prompt.graded.grade(text) for prompt, text in zip(together, texts, strict=True)]
    engine.check()
    return Judged(
        task=task,
        arm=arm,
        batch=batch,
        score=sum(grades) / len(grades),
        samples=len(grades),
        total_s=total_s,
        new_tokens=new_tokens * len(grades),
        peak_bytes=engine.stats().kv_peak_bytes,
        preemptions=preemptions,
    )


def _text_of(model: LoadedModel, answer: Sequence[int]) -> str:
    """Decode an output up to its first end-of-sequence token."""
    assert model.tokenizer is not None, "graded prompts are texts"
    ends = [i for i, token in enumerate(answer) if token in model.generation.eos_token_ids]
    tokens = list(answer[: ends[0]] if ends else answer)
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True))


def run_quality(model: LoadedModel, config: QualityConfig, make_prompts: PromptMaker) -> PartResult:
    """Run the part.

    Args:
        model: model with trained weights.
        config: tasks, lengths and KV memory.
        make_prompts: makes prompts of a task.
    """
    found = list(measure_quality(model, config, make_prompts))
    return PartResult(
        claims=claims(config, found),
        tables=(_quality_table(config, found), _speed_table(config, found)),
        charts=(_chart(config, found),),
        raw={"cells": [asdict(cell) | {"tokens_per_s": cell.tokens_per_s} for cell in found]},
    )


def measure_quality(
    model: LoadedModel, config: QualityConfig, make_prompts: PromptMaker
) -> Iterator[Judged]:
    """Yield the result of every arm for every task."""
    prompts = {task: _encoded(model, config, make_prompts, task) for task in config.tasks}
    for arm in config.arms():
        kv = KVConfig(
            memory=pool_bytes(model, config),
            evict=arm.evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        rows = rows_that_fit(model, kv, config.tokens, config.new_tokens, most=config.samples)
        batch = largest_of(batch_sizes(config.samples), rows)
        if not batch:
            raise ConfigError(
                f"expected {kv.memory:,} B of KV memory to hold a row of arm {arm.name}; raise pool"
            )
        for task in config.tasks:
            yield judge(
                model,
                prompts[task],
                kv,
                task=task,
                arm=arm.name,
                batch=batch,
                new_tokens=config.new_tokens,
            )


def pool_bytes(model: LoadedModel, config: QualityConfig) -> int:
    """KV memory of all arms, in whole MiB, so that partly used slabs cost full KV no row."""
    number_bytes = model.decoder.dtype.itemsize
    rows_bytes = config.pool * config.final_tokens * model.spec.kv_bytes_per_token(number_bytes)
    return -(-rows_bytes // MIB) * MIB


def _encoded(
    model: LoadedModel, config: QualityConfig, make_prompts: PromptMaker, task: str
) -> list[Encoded]:
    assert model.tokenizer is not None, "graded prompts are texts"
    graded_prompts = make_prompts(task, config.tokens, config.samples)
    return [
        Encoded(tokens=tuple(encode_prompt(model.tokenizer, graded.prompt)), graded=graded)
        for graded in graded_prompts
    ]


def over_full(found: Sequence[Judged], arm: str) -> dict[str, float]:
    """An arm's score over full KV's, by task; 1 if full KV scored 0."""
    full = {cell.task: cell.score for cell in found if cell.arm == FKV}
    return {
        cell.task: cell.score / full[cell.task] if full[cell.task] else 1.0
        for cell in found
        if cell.arm == arm
    }


def quality_over_full(found: Sequence[Judged], arm: str) -> float:
    """Mean of the score over full KV's over all tasks."""
    ratios = over_full(found, arm).values()
    return sum(ratios) / len(ratios)


def tokens_per_s(found: Sequence[Judged], arm: str) -> float:
    """Tokens per second over all tasks together."""
    cells = [cell for cell in found if cell.arm == arm]
    return sum(cell.new_tokens for cell in cells) / sum(cell.total_s for cell in cells)


def equal_decode_share(config: QualityConfig, found: Sequence[Judged]) -> float | None:
    """Cap of decode-only eviction (fraction of the prompt) with the quality of Batch-Max.

    Batch-Max has its first cap. Quality between two measured caps is interpolated. None if it is
    outside of the measured caps, or if no cap was measured.
    """
    wanted = quality_over_full(found, bm_name(config.caps[0]))
    shares = zip(config.decode_shares, config.decode_caps, strict=True)
    known = [(share, quality_over_full(found, decode_name(cap))) for share, cap in shares]
    for (share, quality), (next_share, next_quality) in pairwise(known):
        if quality <= wanted <= next_quality and quality < next_quality:
            part = (wanted - quality) / (next_quality - quality)
            return share + part * (next_share - share)
    return None


def claims(config: QualityConfig, found: Sequence[Judged]) -> Numbers:
    """Quality over full KV at every cap; `bm_quality_over_fkv` uses the first cap.

    `equal_quality_decode_share`: see `equal_decode_share`.
    """
    made: Numbers = {"bm_quality_over_fkv": quality_over_full(found, bm_name(config.caps[0]))}
    for arm in config.arms():
        made[f"{_key(config, arm)}_quality_over_fkv"] = quality_over_full(found, arm.name)
        made[f"tiny_{_key(config, arm)}_tokens_per_s"] = tokens_per_s(found, arm.name)
    equal = equal_decode_share(config, found)
    if equal is not None:
        made["equal_quality_decode_share"] = equal
    made["tasks_full_kv_fails"] = sum(c.score == 0 for c in found if c.arm == FKV)
    return made


def _key(config: QualityConfig, arm: EvictionArm) -> str:
    """Claim name of an arm, with its cap as a percentage of the prompt."""
    kind, _, cap = arm.name.partition("_")
    shares = dict(zip(map(str, config.caps), config.shares, strict=True))
    if kind == "decode":
        shares = dict(zip(map(str, config.decode_caps), config.decode_shares, strict=True))
    if cap not in shares or kind == "ed":
        return arm.name
    return f"{kind}_{100 * shares[cap]:g}".replace(".", "_")


def _label(config: QualityConfig, arm: EvictionArm) -> str:
    decoding = dict(zip(config.decode_caps, config.decode_shares, strict=True))
    shares: Mapping[int, float] = decoding | dict(zip(config.caps, config.shares, strict=True))
    cap = int(arm.name.partition("_")[2] or 0)
    known = cap in shares and not arm.name.startswith("ed")
    return arm.label + (f" ({100 * shares[cap]:g} %)" if known else "")


def _quality_table(config: QualityConfig, found: Sequence[Judged]) -> Table:
    scores = {(cell.arm, cell.task): cell.score for cell in found}
    rows: list[tuple[str | float, ...]] = []
    for arm in config.arms():
        by_task = tuple(scores[arm.name, task] for task in config.tasks)
        rows.append((_label(config, arm), *by_task, quality_over_full(found, arm.name)))
    return Table(
        name="batch-max-quality",
        caption=(
            f"Fraction of correct answers, {config.samples} prompts per task of at most "
            f"{config.tokens} tokens, {config.model}; {config.every} tokens evicted at once. Last "
            "column: mean over all tasks of the score over FKV's."
        ),
        columns=("arm", *config.tasks, "over FKV"),
        rows=tuple(rows),
    )


def _speed_table(config: QualityConfig, found: Sequence[Judged]) -> Table:
    full = tokens_per_s(found, FKV)
    rows: list[tuple[str | int | float, ...]] = []
    for arm in config.arms():
        cells = [cell for cell in found if cell.arm == arm.name]
        rate = tokens_per_s(found, arm.name)
        peak_mib = max(cell.peak_bytes for cell in cells) / MIB
        rows.append((_label(config, arm), cells[0].batch, rate, rate / full, peak_mib))
    return Table(
        name="batch-max-tiny",
        caption=(
            f"The same runs: {config.new_tokens} tokens after every prompt, static batches in a "
            f"KV memory of {config.pool} x {config.final_tokens} tokens, prefill included. A model "
            "of this size is bound by dispatch, not by memory or arithmetic."
        ),
        columns=("arm", "batch", "tokens/s", "over FKV", "peak KV MiB"),
        rows=tuple(rows),
    )


def _chart(config: QualityConfig, found: Sequence[Judged]) -> Chart:
    return Chart(
        name="batch-max-quality",
        title="Quality of Batch-Max over full KV, by cap",
        x_label="cap, % of the longest prompt",
        y_label="mean score over that of FKV",
        lines={
            "all tasks": tuple(
                (100 * share, quality_over_full(found, bm_name(cap)))
                for share, cap in zip(config.shares, config.caps, strict=True)
            )
        },
    )
