"""`python -m benchmarks weights`: quality, bytes and decode time of weight codecs.

Parts: quality of a model, KL of random weights, decode steps.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from benchmarks.common.flags import AsJson, parts_option
from benchmarks.common.graded_prompts import load
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.quality.cells import (
    Cell,
    CellKey,
    Judge,
    Material,
    TasksConfig,
    mean_share,
    tasks_table,
)
from benchmarks.quality.command import Out, Prompts, Quick, Text, run_parts
from benchmarks.quality.texts import (
    TextsConfig,
    TextScorer,
    TextScores,
    compare_texts,
    cut_texts,
)
from benchmarks.quant.quality import claims
from quire.cli.options import MODEL, WeightCodec
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.models.base import AttentionCall
from quire.models.loader import LoadedModel

LoadCodec = Callable[[WeightCodec], LoadedModel]
Models = Mapping[str, LoadedModel]
_SEED = 11
PLAIN = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBenchConfig:
    """Configuration of all parts.

    Attributes:
        model: evaluated model: a folder, a hub name or quire-tiny.
        codecs: weight codecs compared with the weights as stored.
        texts, tasks: configuration of the part quality.
        shape: a name in SHAPES; random weights of the parts random and decode.
        random_texts: configuration of the texts of the part random: random tokens.
        dtype: type of the random weights.
        rows: rows of a decode step in the part decode.
        repeats: rounds of all codecs in turn, after one warm-up round.
        steps: steps in each round.
    """

    model: str = "quire-tiny"
    codecs: tuple[WeightCodec, ...] = ("int8", "int4")
    texts: TextsConfig = field(default_factory=TextsConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    shape: str = "125m"
    random_texts: TextsConfig = field(default_factory=lambda: TextsConfig(tokens=192, texts=4))
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 8)
    repeats: int = 5
    steps: int = 8

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"expected one of {', '.join(SHAPES)}, got {self.shape!r}")


QUICK_WEIGHTS = WeightsBenchConfig(
    texts=TextsConfig(tokens=160, texts=2),
    tasks=TasksConfig(tasks=("lines",), tokens=128, prompts=4),
    shape="tiny",
    random_texts=TextsConfig(tokens=96, texts=1),
    rows=(1,),
    repeats=2,
    steps=2,
)


# ---- quality -------------------------------------------------------------------------------------


def run_quality(
    config: WeightsBenchConfig, material: Material, load_codec: LoadCodec
) -> PartResult:
    """Score texts and tasks with every codec.

    Args:
        config: configuration of all parts.
        material: prompts, texts and stored cells; its model is the one with weights as stored.
        load_codec: loads the evaluated model with a weight codec.
    """
    models = {PLAIN: material.model} | {codec: load_codec(codec) for codec in config.codecs}
    texts = cut_texts(material.model, material.running, config.texts.tokens, config.texts.texts)
    found = score_texts(models, config.texts, texts)
    cells = {codec: _cells(codec, model, config, material) for codec, model in models.items()}
    tasks = {codec: mean_share(by_task) for codec, by_task in cells.items()}
    byte_ratios: Numbers = {
        f"weights_{codec}_byte_ratio": material.model.weight_bytes / models[codec].weight_bytes
        for codec in config.codecs
    }
    return PartResult(
        claims=claims(found, PLAIN, "weights_") | task_claims(tasks) | byte_ratios,
        tables=(
            _texts_table(config.texts, material.running.name, found, models),
            tasks_table("weights-tasks", "weights", config.tasks, cells),
        ),
        raw={
            "texts": _raw(found),
            "cells": [cell.to_json() for by_task in cells.values() for cell in by_task.values()],
        },
    )


def _raw(found: Mapping[str, TextScores]) -> list[dict[str, object]]:
    return [{"codec": codec} | one.to_json() for codec, one in found.items()]


def score_texts(
    models: Models, config: TextsConfig, texts: Sequence[list[int]]
) -> dict[str, TextScores]:
    """Score all texts with every model, and compare them with the first; plain KV."""
    scorers = {codec: TextScorer(model, config) for codec, model in models.items()}
    return compare_texts(scorers, scorers[PLAIN], texts, config.first)


def _cells(
    codec: str, model: LoadedModel, config: WeightsBenchConfig, material: Material
) -> dict[str, Cell]:
    judge = Judge(model, config.tasks.rows, material.prompt_maker_for(model))
    keys = [
        CellKey(
            model=config.model,
            task=task,
            tokens=config.tasks.tokens,
            prompts=config.tasks.prompts,
            rule=f"weights {codec}",
            commit=material.commit,
        )
        for task in config.tasks.tasks
    ]
    return {cell.key.task: cell for cell in material.cells(judge.cell, keys)}


def task_claims(tasks: Mapping[str, float]) -> Numbers:
    """Change of the mean fraction of correct answers, and that fraction with stored weights."""
    changes = {f"weights_{c}_tasks_change": tasks[c] - tasks[PLAIN] for c in tasks if c != PLAIN}
    return {"weights_tasks": tasks[PLAIN]} | changes


def _texts_table(
    config: TextsConfig, name: str, found: Mapping[str, TextScores], models: Models
) -> Table:
    plain = found[PLAIN]
    return table_of(
        "weights-texts",
        f"{config.texts} texts of {config.tokens:,} tokens from {name}, scored from token "
        f"{config.first} on, compared with the weights as stored. KL in nats.",
        found,
        {
            "weights": lambda codec: codec,
            "MiB": lambda codec: models[codec].weight_bytes / 2**20,
            "KL": lambda codec: found[codec].mean_kl,
            "top-1": lambda codec: found[codec].mean_top_1,
            "perplexity": lambda codec: found[codec].perplexity,
            "% more": lambda codec: 100 * (found[codec].perplexity / plain.perplexity - 1),
        },
    )


# ---- random weights ------------------------------------------------------------------------------


def run_random(config: WeightsBenchConfig) -> PartResult:
    """Score random tokens with random weights, which have no outliers."""
    models = random_models(config)
    draw = random.Random(_SEED)
    vocab_size, texts = models[PLAIN].spec.vocab_size, config.random_texts
    tokens = [[draw.randrange(vocab_size) for _ in range(texts.tokens)] for _ in range(texts.texts)]
    found = score_texts(models, texts, tokens)
    table = _texts_table(texts, f"random tokens, {config.shape} shape", found, models)
    return PartResult(
        claims=claims(found, PLAIN, "weights_random_"),
        tables=(replace(table, name="weights-random"),),
        raw={"texts": _raw(found)},
    )


def random_models(config: WeightsBenchConfig) -> Models:
    """The same random weights in every codec."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return {
        codec: random_model(SHAPES[config.shape](), dtype=dtype, impl="auto", codec=codec)
        for codec in (PLAIN, *config.codecs)
    }


# ---- decode steps --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of the decode steps of one codec and number of rows, seconds per step and round."""

    codec: str
    rows: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over rounds."""
        return statistics.median(self.seconds)


class _NoContext:
    """Attention of tokens without a context: every row attends to itself."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def run_decode(config: WeightsBenchConfig) -> PartResult:
    """Time steps without a context, which read every weight once; codecs in turn."""
    models = random_models(config)
    times = []
    for rows in config.rows:
        found: dict[str, list[float]] = {codec: [] for codec in models}
        for round_number in range(config.repeats + 1):
            for codec, model in models.items():
                seconds = _step_seconds(model, rows, config.steps)
                found[codec] += [seconds] if round_number else []  # the first is the warm-up
        times += [StepTimes(codec, rows, tuple(each)) for codec, each in found.items()]
    return PartResult(
        claims=step_claims(times),
        tables=(_steps_table(config, times, models),),
        raw={"steps": [[one.codec, one.rows, one.seconds] for one in times]},
    )


def _step_seconds(model: LoadedModel, rows: int, steps: int) -> float:
    tokens, attention = torch.arange(rows), _NoContext()
    start = time.perf_counter()
    for _ in range(steps):
        model.decoder.forward(tokens, tokens, tokens, attention)
    return (time.perf_counter() - start) / steps


def step_claims(times: Sequence[StepTimes]) -> Numbers:
    """Step time with the weights as stored over that of every codec."""
    plain = {one.rows: one.median_s for one in times if one.codec == PLAIN}
    return {
        f"weights_{one.codec}_step_speedup_{one.rows}": plain[one.rows] / one.median_s
        for one in times
        if one.codec != PLAIN
    }


def _steps_table(config: WeightsBenchConfig, times: Sequence[StepTimes], models: Models) -> Table:
    plain = {one.rows: one.median_s for one in times if one.codec == PLAIN}
    return table_of(
        "weights-decode",
        f"Decode steps without a context, {config.shape} shape, {config.dtype}; medians of "
        f"{config.repeats} rounds of {config.steps} steps, codecs in turn.",
        times,
        {
            "rows": lambda one: one.rows,
            "weights": lambda one: one.codec,
            "MiB": lambda one: models[one.codec].weight_bytes / 2**20,
            "ms": lambda one: 1e3 * one.median_s,
            "times faster": lambda one: plain[one.rows] / one.median_s,
        },
    )


@with_settings(MODEL)
def weights(
    settings: Settings,
    *,
    parts: Annotated[str, parts_option("quality", "random", "decode")] = "",
    prompts: Prompts = None,
    text: Text = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare weight codecs: fidelity, tasks, bytes and decode steps."""
    config = replace(QUICK_WEIGHTS if quick else WeightsBenchConfig(), model=settings.model)
    if prompts is not None:
        config = replace(config, tasks=replace(config.tasks, prompts=prompts))
    if settings.loading.dtype != "auto":
        config = replace(config, dtype=settings.loading.dtype)

    def load_codec(codec: WeightCodec) -> LoadedModel:
        return load(replace(settings, loading=replace(settings.loading, weight_codec=codec)))

    def make_parts(material: Material) -> dict[str, Callable[[WeightsBenchConfig], PartResult]]:
        return {
            "quality": lambda c: run_quality(c, material, load_codec),
            "random": run_random,
            "decode": run_decode,
        }

    run_parts(
        "weights", settings, make_parts, parts, config, text, out, quick=quick, as_json=as_json
    )
