"""Runs the same requests through a server and through the offline engine, in turn."""

import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.serve.client import stream_all
from benchmarks.serve.model_files import model_folder
from benchmarks.serve.server import served
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams

HEADLINE = "125m"
"""Shape of the claim `serve_over_offline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Configuration of the benchmark.

    Attributes:
        models: quire-tiny, or shapes of random weights.
        streams: requests at once, each of them a stream.
        input_tokens, output_tokens: lengths of each request.
        rounds: measured rounds of both arms, in turn, after one warm-up round.
        kv_memory: KV memory of both engines.
        files: folder of the written models.
        serve_options: further options of `quire serve`.
    """

    models: tuple[str, ...] = (HEADLINE, "quire-tiny")
    streams: int = 64
    input_tokens: int = 128
    output_tokens: int = 128
    rounds: int = 5
    kv_memory: str = "512MiB"
    files: Path = Path("build/serve")
    serve_options: tuple[str, ...] = ()


QUICK_SERVE = ServeConfig(
    models=("quire-tiny",), streams=4, input_tokens=16, output_tokens=8, rounds=1, kv_memory="16MiB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRound:
    """One round of an arm.

    Attributes:
        total_s: time from the first request to the end of the last one.
        tokens_per_s: output tokens per second.
        first_token_s: median time to the first token.
        kv_peak_bytes: most bytes of KV pages in use since the engine started.
        texts: outputs.
    """

    total_s: float
    tokens_per_s: float
    first_token_s: float
    kv_peak_bytes: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFound:
    """Measured rounds of one model: (server, offline) each."""

    model: str
    rounds: Sequence[tuple[ArmRound, ArmRound]]

    @property
    def ratio(self) -> float:
        """Median over the rounds of the server's tokens/s over those of the offline engine."""
        return statistics.median(s.tokens_per_s / o.tokens_per_s for s, o in self.rounds)

    @property
    def equal_share(self) -> float:
        """Share of the outputs that are equal in both arms."""
        pairs = [p for s, o in self.rounds for p in zip(s.texts, o.texts, strict=True)]
        return sum(a == b for a, b in pairs) / len(pairs)


def run_serve(config: ServeConfig) -> PartResult:
    """Run the part."""
    found = [_measure(config, model) for model in config.models]
    return PartResult(
        claims=claims(found),
        tables=(_table(config, found),),
        raw={
            one.model: [
                {"server": _stored(server), "offline": _stored(offline)}
                for server, offline in one.rounds
            ]
            for one in found
        },
    )


def _stored(arm: ArmRound) -> dict[str, object]:
    return {name: value for name, value in asdict(arm).items() if name != "texts"}


def claims(found: Sequence[ModelFound]) -> Numbers:
    """Ratio, tokens per second, peak KV bytes and equal outputs of each model."""
    numbers: Numbers = {}
    for one in found:
        name = one.model.replace("-", "_")
        key = "serve_over_offline" if one.model == HEADLINE else f"serve_over_offline_{name}"
        numbers[key] = one.ratio
        for arm, place in (("server", 0), ("offline", 1)):
            runs = [pair[place] for pair in one.rounds]
            speed = statistics.median(run.tokens_per_s for run in runs)
            numbers[f"{name}_{arm}_output_tokens_per_s"] = speed
            numbers[f"{name}_{arm}_kv_peak_bytes"] = max(run.kv_peak_bytes for run in runs)
        numbers[f"{name}_equal_outputs"] = one.equal_share
    return numbers


def _measure(config: ServeConfig, model: str) -> ModelFound:
    folder = model_folder(model, config.files)
    memory = KVConfig(memory=config.kv_memory)
    options = ["--kv-memory", config.kv_memory, "--no-access-log", *config.serve_options]
    llm = LLM(folder, kv=memory, verify=False)
    with served(folder, [*options, "--no-verify"]) as url:
        random = np.random.default_rng(0)
        rounds = []
        for number in range(config.rounds + 1):
            shape = (config.streams, config.input_tokens)
            prompts = random.integers(llm.model.spec.vocab_size, size=shape).tolist()
            if number % 2:
                offline = _offline(llm, config, prompts)
                server = _server(url, config, prompts)
            else:
                server = _server(url, config, prompts)
                offline = _offline(llm, config, prompts)
            rounds.append((server, offline))
    return ModelFound(model=model, rounds=rounds[1:])


def _offline(llm: LLM, config: ServeConfig, prompts: Sequence[list[int]]) -> ArmRound:
    sampling = SamplingParams(max_tokens=config.output_tokens, temperature=0, ignore_eos=True)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    total_s = time.perf_counter() - start_s
    return ArmRound(
        total_s=total_s,
        tokens_per_s=sum(one.usage.completion_tokens for one in outputs) / total_s,
        first_token_s=statistics.median(one.usage.first_token_s for one in outputs),
        kv_peak_bytes=llm.stats().kv_peak_bytes,
        texts=tuple(one.text for one in outputs),
    )


def _server(url: str, config: ServeConfig, prompts: Sequence[list[int]]) -> ArmRound:
    found = stream_all(url, prompts, config.output_tokens)
    with urllib.request.urlopen(f"{url}/v1/kv/ledger") as response:
        peak = json.load(response)["peak_bytes"]
    return ArmRound(
        total_s=found.duration_s,
        tokens_per_s=sum(one.output_tokens for one in found.outcomes) / found.duration_s,
        first_token_s=statistics.median(one.ttft_s for one in found.outcomes),
        kv_peak_bytes=peak,
        texts=tuple(one.text for one in found.outcomes),
    )


def _table(config: ServeConfig, found: Sequence[ModelFound]) -> Table:
    return Table(
        name="serve",
        caption=(
            f"{config.streams} streams at once, {config.input_tokens} tokens in and "
            f"{config.output_tokens} out each, medians of {config.rounds} rounds, arms in turn. "
            "The client of the server runs on the same cores."
        ),
        columns=(
            *("model", "arm", "output tokens/s", "server over offline", "first token p50 s"),
            *("peak KV MiB", "equal outputs"),
        ),
        rows=tuple(_row(one, place) for one in found for place in (0, 1)),
    )


def _row(found: ModelFound, place: int) -> tuple[Cell, ...]:
    runs = [pair[place] for pair in found.rounds]
    return (
        found.model,
        ("server", "offline")[place],
        statistics.median(run.tokens_per_s for run in runs),
        found.ratio if place == 0 else None,
        statistics.median(run.first_token_s for run in runs),
        max(run.kv_peak_bytes for run in runs) / 2**20,
        found.equal_share if place == 0 else None,
    )


def with_options(config: ServeConfig, **given: object) -> ServeConfig:
    """The configuration with the given values; None keeps a value."""
    return replace(config, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
