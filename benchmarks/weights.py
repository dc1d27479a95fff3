"""`python -m benchmarks weights`: bytes, decode time and KL of random weights, by weight codec."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.command import run_command
from benchmarks.common.decoding import RecordingDecoder
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from quire.api.llm import LLM
from quire.cli.common import use_threads
from quire.cli.options import WeightCodec
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes
from quire.models.base import AttentionCall
from quire.models.loader import LoadedModel

Models = Mapping[str, LoadedModel]
_SEED = 11
PLAIN = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBenchConfig:
    """Configuration of both parts.

    Attributes:
        codecs: weight codecs compared with the weights as stored.
        shape: a name in SHAPES; its weights are random.
        texts, tokens: number and length of the texts of the part random: random tokens.
        first: index of the first scored token.
        dtype: type of the weights.
        rows: rows of a decode step in the part decode.
        repeats: rounds of all codecs in turn, after one warm-up round.
        steps: steps in each round.
    """

    codecs: tuple[WeightCodec, ...] = ("int8", "int4")
    shape: str = "125m"
    texts: int = 4
    tokens: int = 192
    first: int = 64
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 8)
    repeats: int = 5
    steps: int = 8

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"expected one of {', '.join(SHAPES)}, got {self.shape!r}")


QUICK_WEIGHTS = WeightsBenchConfig(shape="tiny", texts=1, tokens=96, rows=(1,), repeats=2, steps=2)


# ---- random weights ------------------------------------------------------------------------------


def run_random(config: WeightsBenchConfig) -> PartResult:
    """Compare logits after random tokens, with random weights, which have no outliers."""
    models, draw = random_models(config), random.Random(_SEED)
    vocab_size = models[PLAIN].spec.vocab_size
    texts = [
        [draw.randrange(vocab_size) for _ in range(config.tokens)] for _ in range(config.texts)
    ]
    logprobs = {codec: logprobs_of(model, texts, config.first) for codec, model in models.items()}
    kl = {codec: mean_kl(logprobs[PLAIN], found) for codec, found in logprobs.items()}
    table = table_of(
        "weights-random",
        f"{config.texts} texts of {config.tokens} random tokens, {config.shape} shape, scored from "
        f"token {config.first} on, compared with the weights as stored. KL in nats.",
        models,
        {
            "weights": lambda codec: codec,
            "MiB": lambda codec: models[codec].weight_bytes / 2**20,
            "KL": lambda codec: kl[codec],
        },
    )
    claims: Numbers = {f"weights_random_{codec}_kl": kl[codec] for codec in config.codecs}
    return PartResult(claims=claims, tables=(table,))


def logprobs_of(
    model: LoadedModel, texts: Sequence[list[int]], first: int
) -> Float[Tensor, "token vocab"]:
    """Natural log-probabilities after the tokens of all texts, from `first` to the last but one."""
    recorder = RecordingDecoder(model.decoder)
    llm = LLM(replace(model, decoder=recorder), kv=KVConfig(memory="64MiB"))
    options = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)  # logits of all
    found = []
    for text in texts:
        llm.generate([text], options)
        found.append(recorder.take()[first : len(text) - 1].log_softmax(dim=1))
    return torch.cat(found)


def mean_kl(plain: Float[Tensor, "token vocab"], found: Float[Tensor, "token vocab"]) -> float:
    """Mean KL from the distributions of stored weights, in nats; at least 0."""
    return max(float(F.kl_div(found, plain, reduction="batchmean", log_target=True)), 0.0)


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


PARTS: Mapping[str, Callable[[WeightsBenchConfig], PartResult]] = {
    "random": run_random,
    "decode": run_decode,
}


def weights(
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    dtype: Annotated[str, typer.Option(help="Type of the random weights.")] = "bfloat16",
    out: Out = None,
    quick: Annotated[bool, quick_option("A tiny shape, few steps.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare weight codecs: KL with random weights, bytes and decode steps."""
    dtype_bytes(dtype)  # refuses unknown types
    config = replace(QUICK_WEIGHTS if quick else WeightsBenchConfig(), dtype=dtype)
    use_threads(threads)
    run_command("weights", PARTS, parts, config, asdict(config), out, quick=quick, as_json=as_json)
