"""`python -m benchmarks serve`: tokens per second of the server over the offline engine.

The same requests run through both, in turn.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common.command import names_of, run_command
from benchmarks.common.flags import AsJson, Out, Threads
from benchmarks.common.models import random_weights
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.server import Server, served
from benchmarks.common.streams import DONE, OK, Response, stream
from benchmarks.common.workload import SHAPES
from quire.api.llm import LLM
from quire.cli.common import use_threads
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError

PACKAGED = "quire-tiny"
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

    models: tuple[str, ...] = (HEADLINE, PACKAGED)
    streams: int = 64
    input_tokens: int = 128
    output_tokens: int = 128
    rounds: int = 5
    kv_memory: str = "512MiB"
    files: Path = Path("build/serve")
    serve_options: tuple[str, ...] = ()


QUICK_SERVE = ServeConfig(
    models=(PACKAGED,), streams=4, input_tokens=16, output_tokens=8, rounds=1, kv_memory="16MiB"
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
    with served([*options, "--no-verify"], folder) as server:
        random = np.random.default_rng(0)
        rounds = []
        for number in range(config.rounds + 1):
            shape = (config.streams, config.input_tokens)
            prompts = random.integers(llm.model.spec.vocab_size, size=shape).tolist()
            if number % 2:
                offline = _offline(llm, config, prompts)
                online = _online(server, config, prompts)
            else:
                online = _online(server, config, prompts)
                offline = _offline(llm, config, prompts)
            rounds.append((online, offline))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The response to one request; times are those of `time.perf_counter`.

    Attributes:
        start_s: time when it was sent.
        first_s: time of the first event with text.
        end_s: time of the last event.
        output_tokens: tokens by the server's usage.
        text: the output.
    """

    start_s: float
    first_s: float
    end_s: float
    output_tokens: int
    text: str


def outcome_of(response: Response) -> Outcome:
    """Read a streamed response.

    Raises:
        RequestError: the server refused the request, or the stream has an error or no usage.
    """
    if response.status != OK:
        raise RequestError(f"a request of the server failed: {response.body or 'no response'}")
    first_s, end_s, tokens, texts = 0.0, 0.0, 0, []
    for end_s, event in response.events():
        chunk = {} if event == DONE else json.loads(event)
        if chunk.get("error"):
            raise RequestError(f"a request of the server failed: {chunk['error']}")
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        texts += [choice["text"] for choice in chunk.get("choices", ())]
        first_s = first_s or (end_s if any(texts) else 0.0)
    if not tokens:
        raise RequestError("a response of the server has no usage")
    return Outcome(
        start_s=response.sent_s,
        first_s=first_s,
        end_s=end_s,
        output_tokens=tokens,
        text="".join(texts),
    )


def stream_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Outcome]:
    """Send all prompts at once to /v1/completions, greedy and with full length.

    Raises:
        RequestError: a request failed.
    """
    body: dict[str, Any] = {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def every() -> list[Response]:
        return await asyncio.gather(*(stream(url, body | {"prompt": [*p]}) for p in prompts))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return [outcome_of(response) for response in runner.run(every())]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Event loop of uvloop if it is installed: the client runs on the cores of the server."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _online(server: Server, config: ServeConfig, prompts: Sequence[list[int]]) -> ArmRound:
    found = stream_all(server.url, prompts, config.output_tokens)
    total_s = max(one.end_s for one in found) - min(one.start_s for one in found)
    return ArmRound(
        total_s=total_s,
        tokens_per_s=sum(one.output_tokens for one in found) / total_s,
        first_token_s=statistics.median(one.first_s - one.start_s for one in found),
        kv_peak_bytes=server.get("/v1/kv/ledger")["peak_bytes"],
        texts=tuple(one.text for one in found),
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


def model_folder(name: str, files: Path) -> str:
    """The folder of a shape, which is written unless it exists; quire-tiny is packaged.

    Args:
        name: quire-tiny, or a shape of SHAPES.
        files: folder of the written models.
    """
    if name == PACKAGED:
        return PACKAGED
    folder = files / f"llama-{name}"
    if not folder.exists():
        files.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=files) as made:
            shape = SHAPES[name]()
            model = random_weights(shape, dtype=torch.bfloat16)
            model.save_pretrained(f"{made}/model")
            _write_tokenizer(shape.vocab_size, f"{made}/model")
            (Path(made) / "model").rename(folder)
    return str(folder)


def _write_tokenizer(vocab_size: int, folder: str) -> None:
    """Write a tokenizer of words: token i is the word w<i>."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=tokenizer).save_pretrained(folder)


def serve(  # noqa: PLR0913 - one parameter per option
    *,
    models: Annotated[
        str, typer.Option(help="Models: 125m, quire-tiny, or other shapes; default: both.")
    ] = "125m,quire-tiny",
    streams: Annotated[int | None, typer.Option(min=1, help="Streams; default: 64.")] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt; default: 128.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="Generated tokens per prompt; default: 128.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; default: 5.")] = None,
    serve_option: Annotated[
        list[str] | None, typer.Option(help="Further argument of quire serve. Can be repeated.")
    ] = None,
    files: Annotated[Path, typer.Option(help="Folder of the written models.")] = Path(
        "build/serve"
    ),
    out: Out = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="quire-tiny and few short streams. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run the same requests through `quire serve` and through the offline engine, in turn.

    The claim serve_over_offline is the ratio of output tokens per second. The client of the server
    runs on the same cores.
    """
    use_threads(threads)
    names = names_of(models, {**SHAPES, PACKAGED: None}, "model")
    config = with_options(
        QUICK_SERVE if quick else ServeConfig(models=names),
        streams=streams,
        input_tokens=input_len,
        output_tokens=output_len,
        rounds=rounds,
        files=files,
        serve_options=tuple(serve_option or ()),
    )
    made, used = {"serve": run_serve}, asdict(config) | {"files": str(config.files)}
    run_command("serve", made, "", config, used, out, quick=quick, as_json=as_json)
