"""Configuration of the comparison: shapes of work, models, engines, and memory."""

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.models import SHAPES
from quire.errors import ConfigError, UnknownName

MAIN_MODEL = "125m"
TRACE = "trace"
TRACE_REQUESTS = 64
FIXED = "fixed"
_SHAPE = re.compile(rf"(?:({FIXED}):)?(\d+)x(\d+)\+(\d+)")
AMPLE, QUARTER = 2.0, 0.25
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requests that all arrive at the start.

    Attributes:
        name: name in options and tables: PROMPTSxPROMPT_TOKENS+NEW_TOKENS, with the prefix "fixed:"
            in a quarter of the KV memory; or "trace".
        kv_share: size of the KV memory over what all requests need at their final length.
        lengths: prompt and output tokens of each request.
    """

    name: str
    kv_share: float
    lengths: tuple[tuple[int, int], ...]

    @property
    def is_fixed(self) -> bool:
        """Whether the KV memory is too small for all requests."""
        return self.kv_share < 1

    @property
    def needed_tokens(self) -> int:
        """Tokens of all requests at their final length."""
        return sum(prompt + new for prompt, new in self.lengths)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request."""
        return max(prompt + new for prompt, new in self.lengths)

    @property
    def new_tokens(self) -> int:
        """Tokens to generate."""
        return sum(new for _, new in self.lengths)

    def kv_bytes(self, bytes_per_token: int) -> int:
        """Size of the KV memory."""
        return int(self.needed_tokens * bytes_per_token * self.kv_share)


def parse_shape(name: str) -> Shape:
    """Parse the name of a shape.

    Raises:
        ConfigError: not such a name.
    """
    if name == TRACE:
        return Shape(name=name, kv_share=AMPLE, lengths=trace_lengths())
    found = _SHAPE.fullmatch(name)
    numbers = [int(number) for number in found.groups()[1:]] if found else [0]
    if found is None or not all(numbers):
        raise ConfigError(
            f"expected a shape such as 32x512+64 (prompts x prompt tokens + new tokens), "
            f"{FIXED}:32x512+256 (in a quarter of the KV memory) or {TRACE}, got {name!r}"
        )
    prompts, prompt_tokens, new_tokens = numbers
    return Shape(
        name=name,
        kv_share=QUARTER if found[1] else AMPLE,
        lengths=((prompt_tokens, new_tokens),) * prompts,
    )


def trace_lengths() -> tuple[tuple[int, int], ...]:
    """A quarter of the lengths of the packaged Azure trace's first requests, each 2 or more."""
    from importlib.resources import as_file, files

    from quire.sim.traces.base import TraceOptions
    from quire.sim.traces.loading import load_trace

    options = TraceOptions(requests=TRACE_REQUESTS, length_scale=0.25)
    packaged = files("quire").joinpath("assets", "azure_conversation.csv.gz")
    with as_file(packaged) as path:
        found = load_trace(path, options)
    return tuple(
        (max(2, request.prompt_tokens), max(2, request.answer.tokens)) for request in found.requests
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Cap of OpenVINO with eviction, in tokens of a sequence.

    Attributes:
        start, recent: first and newest tokens that are always retained.
        most: all retained tokens.
        kvcrush: tokens that KVCrush selects.
    """

    start: int = 32
    recent: int = 64
    most: int = 192
    kvcrush: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """Configuration of a run.

    Attributes:
        models: names in SHAPES.
        shapes: shapes of work; every model runs each that its context allows.
        engines: names of engines, Quire's first.
        environments: folder with an environment per engine.
        files: folder of the models.
        repeats: rounds; in each, every engine runs once in a new process.
        threads: CPU threads of each engine.
        dtype: dtype for engines that let the user choose.
        timeout_s: longest time of one process.
        run_under: command that each process runs under.
        judged_prompts: number of first outputs whose regret is computed; 0: none.
        max_num_batched_tokens: token budget of a step.
        eviction: cap of OpenVINO with eviction.
    """

    models: tuple[str, ...]
    shapes: tuple[Shape, ...]
    engines: tuple[str, ...]
    environments: Path
    files: Path
    repeats: int = 5
    threads: int = 2
    dtype: str = "bfloat16"
    timeout_s: float = 900.0
    run_under: tuple[str, ...] = ()
    judged_prompts: int = 2
    max_num_batched_tokens: int = 2048
    eviction: Eviction = Eviction()

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in SHAPES:
                raise UnknownName("model", model, SHAPES)
            context = SHAPES[model]().max_position_embeddings
            for shape in self.shapes:
                if shape.longest_tokens > context:
                    raise ConfigError(
                        f"{shape.name} has a request of {shape.longest_tokens} tokens, but the "
                        f"context of the model {model} is {context}: leave one of them out"
                    )
