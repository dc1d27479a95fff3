"""Parts of the weight codec benchmark: quality of a model, KL of random weights, decode steps."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.common.models import random_weights
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.eviction.cells import FULL, Cell, CellKey
from benchmarks.eviction.parts import Material
from benchmarks.eviction.quality import Judge, mean_share, measure_cells, tasks_table
from benchmarks.eviction.texts import cut_texts
from benchmarks.kvcrush.text_scores import divergence
from benchmarks.quant.config import PLAIN as PLAIN_KV
from benchmarks.quant.config import TextsConfig
from benchmarks.quant.text_scores import CodecTexts, TextScorer, joined
from benchmarks.weights.config import PLAIN, WeightsBenchConfig
from quire.cli.options import WeightCodec
from quire.models.base import AttentionCall
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.native.select import make_decoder
from quire.models.weights import weight_bytes

LoadCodec = Callable[[WeightCodec], LoadedModel]
Models = Mapping[str, LoadedModel]
Part = Callable[[WeightsBenchConfig], PartResult]
_SEED = 11


def make_parts(material: Material, load_codec: LoadCodec) -> Mapping[str, Part]:
    """Create all parts.

    Args:
        material: prompts, texts and stored cells; its model is the one with weights as stored.
        load_codec: loads the evaluated model with a weight codec.
    """
    return {
        "quality": lambda config: run_quality(config, material, load_codec),
        "random": run_random,
        "decode": run_decode,
    }


# ---- quality -------------------------------------------------------------------------------------


def run_quality(
    config: WeightsBenchConfig, material: Material, load_codec: LoadCodec
) -> PartResult:
    """Score texts and tasks with every codec."""
    models = {PLAIN: material.model} | {codec: load_codec(codec) for codec in config.codecs}
    texts = cut_texts(material.model, material.running, config.texts.tokens, config.texts.texts)
    found = score_texts(models, config.texts, texts)
    cells = {codec: _cells(codec, model, config, material) for codec, model in models.items()}
    tasks = {codec: mean_share(by_task) for codec, by_task in cells.items()}
    return PartResult(
        claims=kl_claims(found) | task_claims(tasks) | byte_claims(models),
        tables=(
            _texts_table(config.texts, material.running.name, found, models),
            tasks_table("weights-tasks", "weights", config.tasks, cells),
        ),
        raw={
            "texts": [one.to_json() for one in found.values()],
            "cells": [cell.to_json() for by_task in cells.values() for cell in by_task.values()],
        },
    )


def score_texts(
    models: Models, config: TextsConfig, texts: Sequence[list[int]]
) -> dict[str, CodecTexts]:
    """Score all texts with every model, and compare them with the first; plain KV."""
    scorers = {codec: TextScorer(model, config, PLAIN_KV) for codec, model in models.items()}
    scores: dict[str, list[tuple[float, float, float, int]]] = {codec: [] for codec in models}
    for text in texts:
        following = torch.tensor(text[config.first + 1 :])
        wanted, _ = scorers[PLAIN].score(text)
        for codec, scorer in scorers.items():
            found, num_bytes = scorer.score(text)
            kl, top_1 = divergence(wanted.float(), found.float())
            nats = -float(found.gather(1, following[:, None]).mean())
            scores[codec].append((max(kl, 0.0), top_1, nats, num_bytes))
    return {codec: joined(codec, rows) for codec, rows in scores.items()}


def _cells(
    codec: str, model: LoadedModel, config: WeightsBenchConfig, material: Material
) -> dict[str, Cell]:
    judge = Judge(model, config.tasks, material.prompt_maker_for(model))
    keys = [
        CellKey(
            model=config.model,
            task=task,
            tokens=config.tasks.tokens,
            prompts=config.tasks.prompts,
            rule=f"weights {codec}",
            when="",
            budget=1.0,
            evict=FULL,
            commit=material.commit,
        )
        for task in config.tasks.tasks
    ]
    found = measure_cells(judge.cell, keys, material.stored, material.show)
    return {cell.key.task: cell for cell in found}


def kl_claims(found: Mapping[str, CodecTexts], prefix: str = "weights_") -> Numbers:
    """KL, top-1 agreement and perplexity increase of every codec."""
    plain = found[PLAIN]
    made: Numbers = {}
    for codec, one in found.items():
        if codec != PLAIN:
            made[f"{prefix}{codec}_kl"] = one.mean_kl
            made[f"{prefix}{codec}_top_1"] = statistics.mean(one.top_1)
            made[f"{prefix}{codec}_perplexity_change"] = one.perplexity / plain.perplexity - 1
    return made


def task_claims(tasks: Mapping[str, float]) -> Numbers:
    """Change of the mean fraction of correct answers, and that fraction with stored weights."""
    changes = {f"weights_{c}_tasks_change": tasks[c] - tasks[PLAIN] for c in tasks if c != PLAIN}
    return {"weights_tasks": tasks[PLAIN]} | changes


def byte_claims(models: Models) -> Numbers:
    """Bytes of the stored weights over those of every codec."""
    plain = models[PLAIN].weight_bytes
    return {
        f"weights_{c}_byte_ratio": plain / m.weight_bytes for c, m in models.items() if c != PLAIN
    }


def _texts_table(
    config: TextsConfig, name: str, found: Mapping[str, CodecTexts], models: Models
) -> Table:
    plain = found[PLAIN]
    rows = tuple(
        (
            codec,
            models[codec].weight_bytes / 2**20,
            one.mean_kl,
            statistics.mean(one.top_1),
            one.perplexity,
            100 * (one.perplexity / plain.perplexity - 1),
        )
        for codec, one in found.items()
    )
    return Table(
        name="weights-texts",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, scored from token "
            f"{config.first} on, compared with the weights as stored. KL in nats."
        ),
        columns=("weights", "MiB", "KL", "top-1", "perplexity", "% more"),
        rows=rows,
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
        claims=kl_claims(found, "weights_random_"),
        tables=(replace(table, name="weights-random"),),
        raw={"texts": [one.to_json() for one in found.values()]},
    )


def random_models(config: WeightsBenchConfig) -> Models:
    """The same random weights in every codec."""
    return {codec: _random_model(config, codec) for codec in config.all_codecs}


def _random_model(config: WeightsBenchConfig, codec: str) -> LoadedModel:
    model = random_weights(SHAPES[config.shape](), dtype=getattr(torch, config.dtype))
    decoder = make_decoder(model, None, impl="auto", codec=codec)
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name=f"random {config.shape}",
        weight_bytes=weight_bytes(model),
    )


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
    times = [one for rows in config.rows for one in _time_steps(config, models, rows)]
    return PartResult(
        claims=step_claims(times),
        tables=(_steps_table(config, times, models),),
        raw={"steps": [[one.codec, one.rows, one.seconds] for one in times]},
    )


def _time_steps(config: WeightsBenchConfig, models: Models, rows: int) -> Iterator[StepTimes]:
    found: dict[str, list[float]] = {codec: [] for codec in models}
    for round_number in range(config.repeats + 1):
        for codec, model in models.items():
            seconds = _step_seconds(model, rows, config.steps)
            if round_number:  # the first is the warm-up
                found[codec].append(seconds)
    for codec, each in found.items():
        yield StepTimes(codec, rows, tuple(each))


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
    return Table(
        name="weights-decode",
        caption=(
            f"Decode steps without a context, {config.shape} shape, {config.dtype}; medians of "
            f"{config.repeats} rounds of {config.steps} steps, codecs in turn."
        ),
        columns=("rows", "weights", "MiB", "ms", "times faster"),
        rows=tuple(
            (
                one.rows,
                one.codec,
                models[one.codec].weight_bytes / 2**20,
                1e3 * one.median_s,
                plain[one.rows] / one.median_s,
            )
            for one in times
        ),
    )
