"""The run of `quire demo`: runs all prompts in one small KV memory and measures them.

Imports torch through the engine: the command imports this module when it runs.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quire.api.llm import LLM
from quire.cli.drive import ClientJob, Driver
from quire.cli.exactness import TIE_LOGITS, Exactness
from quire.cli.startup import is_terminal
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.stats import EngineStats, RequestBytes
from quire.errors import ConfigError, QuireError
from quire.evals.gate import DOCUMENT_START
from quire.evals.tasks import Measure, make
from quire.evals.tasks.words import haystack
from quire.layout.sizes import format_size
from quire.sampling.outputs import RequestOutput

NUM_QUESTIONS = 64
FACT_TASKS = ("kv", "niah")
FACT_TOKENS = 256
FACT_SHARE = 8
"""One in `FACT_SHARE` prompts is a retrieval prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """A prompt of the demo."""

    text: str
    max_tokens: int
    # expected beginning of the output; None for a question without a check
    answer: str | None = None


def demo_prompts(count: int, max_tokens: int, measure: Measure) -> list[DemoPrompt]:
    """The prompts, equal on every machine; one in eight asks for a record in its context."""
    if not 1 <= count <= NUM_QUESTIONS:
        raise ConfigError(f"expected 1 to {NUM_QUESTIONS} requests, got {count}")
    texts = questions()
    return [
        fact_prompt(index // FACT_SHARE, measure)
        if index % FACT_SHARE == FACT_SHARE - 1
        else DemoPrompt(text=DOCUMENT_START + texts[index], max_tokens=max_tokens)
        for index in range(count)
    ]


def questions() -> list[str]:
    """The first questions of GSM8K's test set."""
    lines = (files("quire") / "assets" / "gsm8k_64.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["question"] for line in lines.split("\n") if line]


def fact_prompt(index: int, measure: Measure) -> DemoPrompt:
    """Create a prompt that asks for a record in its context; deterministic for an index."""
    name = FACT_TASKS[index % len(FACT_TASKS)]
    task = make(name, index, FACT_TOKENS, filler=haystack(), measure=measure)
    answer = task.queries[0].answer
    return DemoPrompt(
        text=DOCUMENT_START + task.prompt(), max_tokens=measure(answer), answer=answer
    )


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """KV memory at the step with the most running requests."""

    running: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0  # if prompt and max_tokens of these requests were reserved in advance
    contiguous_bytes: int = 0  # if the whole context were reserved for each of these requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One use of the same KV memory."""

    name: str  # prefix of its claims
    title: str
    codec: str = "none"
    evict: str = "full"


FULL = Variant(name="full", title="full KV")
_BATCH_MAX = "average:cap=64"
COMPRESSED = (
    Variant(name="int8", title="int8 pages", codec="int8"),
    Variant(name="batch_max", title="Batch-Max eviction", evict=_BATCH_MAX),
    Variant(name="batch_max_int8", title="Batch-Max and int8", codec="int8", evict=_BATCH_MAX),
)
"""Batch-Max: evict during prefill and decode, so that no request exceeds the cap."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo."""

    prompts: Sequence[DemoPrompt]
    outputs: Sequence[RequestOutput]
    memory_peak: MemoryPeak  # at the step with the most running requests
    stats: EngineStats
    seconds: float  # without model loading

    @property
    def facts(self) -> list[bool]:
        """Whether the output of each retrieval prompt is correct."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [a.text.startswith(p.answer) for p, a in pairs if p.answer is not None]

    def claims(self) -> dict[str, int | float]:
        new_tokens = sum(a.usage.completion_tokens for a in self.outputs)
        first_s = [a.usage.first_token_s for a in self.outputs]
        used = [a.usage for a in self.outputs if a.usage.completion_tokens > 1]
        token_s = [(u.total_s - u.first_token_s) / (u.completion_tokens - 1) for u in used]
        return {
            "requests": len(self.outputs),
            "prompt_tokens": sum(a.usage.prompt_tokens for a in self.outputs),
            "completion_tokens": new_tokens,
            "run_s": self.seconds,
            "completion_tokens_per_s": new_tokens / self.seconds,
            "first_token_p50_s": _percentile(first_s, 50),
            "first_token_p99_s": _percentile(first_s, 99),
            "token_p50_s": _percentile(token_s, 50),
            "token_p99_s": _percentile(token_s, 99),
            "kv_total_bytes": self.stats.kv_total_bytes,
            "kv_peak_bytes": self.stats.kv_peak_bytes,
            "most_running": self.memory_peak.running,
            "crowd_used_bytes": self.memory_peak.used_bytes,
            "crowd_reserved_bytes": self.memory_peak.reserved_bytes,
            "crowd_contiguous_bytes": self.memory_peak.contiguous_bytes,
            "preemptions": self.stats.num_preemptions,
            "facts_asked": len(self.facts),
            "facts_right": sum(self.facts),
        }

    def comparison(self, name: str, full: "DemoResult") -> dict[str, int | float]:
        """Claims of a variant, with the number of outputs equal to those with full KV."""
        own = self.claims()
        kept = ("run_s", "completion_tokens_per_s", "kv_peak_bytes", "most_running", "facts_right")
        pairs = zip(self.outputs, full.outputs, strict=True)
        equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
        return {f"{name}_{key}": own[key] for key in kept} | {f"{name}_equal_outputs": equal}


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


class DemoRun:
    """Runs prompts and samples the engine's memory use."""

    def __init__(self, llm: LLM, prompts: Sequence[DemoPrompt], title: str = FULL.title) -> None:
        self._llm, self._prompts, self._title = llm, prompts, title
        self._outputs: dict[int, RequestOutput] = {}
        self._memory_peak = MemoryPeak()

    def run(self) -> DemoResult:
        start_s = time.monotonic()
        with LivePages(self._title, len(self._prompts), self._page_bytes()) as live:

            def on_step() -> None:
                self._watch()
                live.show(len(self._outputs), self._llm.stats)

            driver = Driver(self._llm, window=len(self._prompts), on_step=on_step)
            for job, output in driver.run(iter(self._jobs())):
                if isinstance(output, QuireError):
                    raise output
                self._outputs[job.key] = output
        return DemoResult(
            prompts=self._prompts,
            outputs=[self._outputs[key] for key in range(len(self._prompts))],
            memory_peak=self._memory_peak,
            stats=self._llm.stats(),
            seconds=time.monotonic() - start_s,
        )

    def _page_bytes(self) -> int:
        model = self._llm.model
        return model.spec.kv_bytes(KVConfig().page_tokens, model.decoder.dtype.itemsize)

    def _jobs(self) -> list[ClientJob]:
        return [
            ClientJob(
                key=key,
                request=GenerationRequest(
                    prompt.text, SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
                ),
            )
            for key, prompt in enumerate(self._prompts)
        ]

    def _watch(self) -> None:
        running = self._llm.engine.scheduler.running
        if len(running) <= self._memory_peak.running:
            return
        spec = self._llm.model.spec
        value_bytes = self._llm.model.decoder.dtype.itemsize
        reserved = [len(r.prompt_token_ids) + r.params.max_tokens for r in running]
        self._memory_peak = MemoryPeak(
            running=len(running),
            used_bytes=self._llm.stats().kv_held_bytes,
            reserved_bytes=sum(spec.kv_bytes(tokens, value_bytes) for tokens in reserved),
            contiguous_bytes=len(running) * spec.kv_bytes(spec.max_positions, value_bytes),
        )


REFRESH_S = 0.2
_HEADER_LINES = 4
_EIGHTHS = " ▏▎▍▌▋▊▉"


class LivePages:
    """Rows of running requests with a bar of their KV bytes; disabled without a terminal."""

    def __init__(self, title: str, total: int, cell_bytes: int) -> None:
        self._title, self._total, self._cell_bytes = title, total, cell_bytes
        self._console = Console(stderr=True)
        self.enabled = is_terminal(sys.stderr) and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._start_s = time.monotonic()
        self._shown_s = 0.0

    def __enter__(self) -> "LivePages":
        if self.enabled:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.enabled:
            self._live.stop()

    def show(self, done: int, read: Callable[[], EngineStats]) -> None:
        """Update the view, at most every `REFRESH_S` seconds; cheap enough for every step."""
        now_s = time.monotonic()
        if not self.enabled or now_s - self._shown_s < REFRESH_S:
            return
        self._shown_s = now_s
        stats = read()
        speed = stats.num_generated_tokens / max(now_s - self._start_s, REFRESH_S)
        header = (
            f"{self._title}: {done} of {self._total} requests done, {stats.num_running} running, "
            f"{stats.num_waiting} waiting\n"
            f"{speed:,.0f} tokens/s, {format_size(stats.kv_held_bytes)} of "
            f"{format_size(stats.kv_total_bytes)} of KV memory; one █ is "
            f"{format_size(self._cell_bytes)}\n"
        )
        rows = max(1, self._console.height - _HEADER_LINES)
        requests = request_rows(stats.requests, rows, self._cell_bytes, self._console.width)
        self._live.update(Group(Text(header), requests), refresh=True)


def request_rows(
    requests: tuple[RequestBytes, ...], rows: int, cell_bytes: int, width: int
) -> Table:
    """One row for each request: its id, its tokens and a bar; the last row counts the others."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, overflow="crop")
    shown = requests if len(requests) <= rows else requests[: rows - 1]
    for request in shown:
        bar = Text(bar_of(request.kv_bytes, cell_bytes, width // 2), style="green")
        grid.add_row(request.request_id, f"{request.tokens} tokens", bar)
    if len(shown) < len(requests):
        grid.add_row(f"and {len(requests) - len(shown)} more", "", "")
    return grid


def bar_of(size_bytes: int, cell_bytes: int, width: int) -> str:
    """Bar of a size, at most `width` characters, in eighths of a character."""
    eighths = min(8 * width, round(8 * size_bytes / cell_bytes))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


_SHOWN_CHARACTERS = 60


def show_demo(result: DemoResult, claims: Mapping[str, int | float], exactness: Exactness) -> None:
    """Print the result of the demo on standard output."""
    console = Console()
    for prompt, output in _examples(result):
        console.print(_example(prompt, output))
    table = Table(show_header=False)
    for name, value in _rows(claims):
        table.add_row(name, value)
    console.print(table)
    console.print(_comparison(exactness))


def show_comparison(variants: Sequence[Variant], claims: Mapping[str, int | float]) -> None:
    """Print one row for each use of the same KV memory."""
    total = _size(claims["kv_total_bytes"])
    table = Table(title=f"The same prompts in the same {total} of KV memory", title_justify="left")
    table.add_column("KV memory", overflow="fold")
    for column in ("peak running requests", "output tokens/s", "peak KV", "records retrieved"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("outputs as with full KV", justify="right", overflow="fold")
    for variant in variants:
        table.add_row(variant.title, *_cells(f"{variant.name}_", claims))
    console = Console()
    console.print(table)
    evicting = next(variant for variant in variants if variant.evict != "full")
    console.print(
        f"Batch-Max is --evict {evicting.evict}: no request exceeds the cap, in prefill or decode. "
        "It loses records that it evicts, and computes statistics of the attention; int8 halves "
        "bfloat16 and quarters float32 KV at nearly equal outputs.",
        highlight=False,
    )


def _cells(prefix: str, claims: Mapping[str, int | float]) -> tuple[str, ...]:
    return (
        f"{claims[f'{prefix}most_running']}",
        f"{claims[f'{prefix}completion_tokens_per_s']:,.0f}",
        _size(claims[f"{prefix}kv_peak_bytes"]),
        f"{claims[f'{prefix}facts_right']} of {claims['facts_asked']}",
        f"{claims[f'{prefix}equal_outputs']} of {claims['requests']}",
    )


def _examples(result: DemoResult) -> Iterator[tuple[DemoPrompt, RequestOutput]]:
    pairs = list(zip(result.prompts, result.outputs, strict=True))
    yield pairs[0]
    yield from [pair for pair in pairs[1:] if pair[0].answer is not None][:1]


def _example(prompt: DemoPrompt, output: RequestOutput) -> str:
    end = escape(repr(prompt.text[-_SHOWN_CHARACTERS:]))
    text = escape(repr(output.text[:_SHOWN_CHARACTERS]))
    if prompt.answer is None:
        return f"...{end} -> {text}"
    right = output.text.startswith(prompt.answer)
    verdict = "[green]correct[/]" if right else f"[red]wrong, expected {prompt.answer}[/]"
    return f"...{end} -> {text} ({verdict})"


def _rows(claims: Mapping[str, int | float]) -> Iterator[tuple[str, str]]:
    most = claims["most_running"]
    yield "requests", f"{claims['requests']} in {claims['run_s']:.1f} s"
    yield (
        "tokens",
        f"{claims['prompt_tokens']:,} prompt, {claims['completion_tokens']:,} output",
    )
    yield "output throughput", f"{claims['completion_tokens_per_s']:,.0f} tokens/s"
    yield (
        "time to first token, with queueing",
        f"p50 {1000 * claims['first_token_p50_s']:,.0f} ms, "
        f"p99 {1000 * claims['first_token_p99_s']:,.0f} ms",
    )
    yield (
        "time per output token",
        f"p50 {1000 * claims['token_p50_s']:.0f} ms, p99 {1000 * claims['token_p99_s']:.0f} ms",
    )
    yield "KV memory", f"{_size(claims['kv_total_bytes'])}, peak {_size(claims['kv_peak_bytes'])}"
    yield "peak running requests", f"{most}, {_size(claims['crowd_used_bytes'])} of pages in use"
    yield (
        f"  for these {most}: prompt + max_tokens reserved",
        _size(claims["crowd_reserved_bytes"]),
    )
    yield (
        f"  for these {most}: whole context reserved",
        _size(claims["crowd_contiguous_bytes"]),
    )
    yield "preemptions", f"{claims['preemptions']}"
    yield "records retrieved", f"{claims['facts_right']} of {claims['facts_asked']}"


def _size(size_bytes: int | float) -> str:
    return format_size(int(size_bytes))


def _comparison(exactness: Exactness) -> str:
    same = f"{exactness.equal} of {exactness.checked} outputs are equal token by token"
    if exactness.ties:
        same += f", {exactness.ties} up to a tie (two logits within {TIE_LOGITS:g})"
    style = "green" if exactness.passed else "bold red"
    return f"[{style}]compared with Transformers in float32: {same}[/]"
