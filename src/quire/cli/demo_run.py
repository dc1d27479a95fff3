"""The run of `quire demo`: a chat model answers questions in one small KV memory.

Imports torch through the engine: the command imports this module when it runs.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from quire.errors import QuireError
from quire.evals.tasks.words import book_text
from quire.layout.sizes import format_size
from quire.sampling.outputs import RequestOutput

# opening words and characters of passages in haystack.txt; 1,000 to 1,200 tokens each
DOCUMENTS = {
    "society": ("There was a large audience", 4_800),
    "article": ("On the next day, in its number", 5_000),
    "servant": ("Dr. Ferguson had a servant", 4_700),
    "board": ("Isn't it almost time", 5_400),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, about a document or in a chat; outputs that contain an answer are right."""

    document: str
    text: str
    answers: tuple[str, ...]

    def prompt(self) -> str:
        return (
            f"{document_text(self.document)}\n\n"
            f"Question about the text: {self.text} Answer with a few words."
        )

    def is_right(self, output: str) -> bool:
        return any(answer.casefold() in output.casefold() for answer in self.answers)


# consecutive questions are about different documents, as those of different users
QUESTIONS = (
    Question(
        "society",
        "When was the session of the Royal Geographical Society?",
        ("January 14", "14th of January"),
    ),
    Question("article", "Which newspaper published the article?", ("Daily Telegraph",)),
    Question("servant", "What is the name of the servant of Dr. Ferguson?", ("Joe",)),
    Question("board", "In which city does the Board sit?", ("London",)),
    Question("society", "Which single word did Dr. Ferguson say?", ("Excelsior",)),
    Question("article", "Who is the captain of the Resolute?", ("Bennett",)),
    Question("board", "Which district cut itself out of all systems?", ("Illinois",)),
    Question("society", "What is the name of the president?", ("Sir Francis",)),
)
CHAT = (
    Question("", "What is the capital of France?", ("Paris",)),
    Question("", "Which river flows through it?", ("Seine",)),
    Question("", "Which language do people speak there?", ("French",)),
)


def document_text(name: str) -> str:
    """The passage, up to the end of its last whole paragraph."""
    opening, characters = DOCUMENTS[name]
    start = book_text().index(opening)
    return book_text()[start : start + characters].rpartition("\n\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One use of the same KV memory."""

    name: str  # prefix of its claims
    title: str
    codec: str = "none"
    evict: str = "full"


FULL = Variant(name="full", title="full KV")
_EVICT = "kvcrush:base=snapkv,cap=512,when=prefill_end"
COMPRESSED = (
    Variant(name="int8", title="int8 pages", codec="int8"),
    Variant(name="evict", title="eviction", evict=_EVICT),
    Variant(name="evict_int8", title="eviction and int8", codec="int8", evict=_EVICT),
)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of one use of the memory."""

    answers: Sequence[RequestOutput]  # to the questions
    chat: Sequence[RequestOutput]  # one reply per turn
    max_running: int
    stats: EngineStats
    seconds: float  # of the questions, without the chat and the model's loading

    @property
    def right(self) -> list[bool]:
        """Whether each answer and each reply is right."""
        questions, outputs = [*QUESTIONS, *CHAT], [*self.answers, *self.chat]
        return [
            question.is_right(output.text)
            for question, output in zip(questions, outputs, strict=True)
        ]

    def claims(self, prefix: str = "") -> dict[str, int | float]:
        outputs = [*self.answers, *self.chat]
        new_tokens = sum(answer.usage.completion_tokens for answer in self.answers)
        claims = {
            "requests": len(outputs),
            "prompt_tokens": sum(output.usage.prompt_tokens for output in outputs),
            "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
            "completion_tokens": sum(output.usage.completion_tokens for output in outputs),
            "run_s": self.seconds,
            "completion_tokens_per_s": new_tokens / self.seconds,
            "kv_total_bytes": self.stats.kv_total_bytes,
            "kv_peak_bytes": self.stats.kv_peak_bytes,
            "max_running": self.max_running,
            "preemptions": self.stats.num_preemptions,
            "answers": len(self.right),
            "right": sum(self.right),
        }
        return {f"{prefix}{name}": value for name, value in claims.items()}


class DemoRun:
    """Asks all questions at once and then holds the chat, in one engine."""

    def __init__(self, llm: LLM, title: str, max_tokens: int) -> None:
        self._llm, self._title = llm, title
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._max_running = 0

    def run(self) -> DemoResult:
        start_s = time.monotonic()
        answers = self._answers()
        seconds = time.monotonic() - start_s
        return DemoResult(answers, self._chat(), self._max_running, self._llm.stats(), seconds)

    def _answers(self) -> list[RequestOutput]:
        found: dict[int, RequestOutput] = {}
        with LivePages(self._title, len(QUESTIONS), self._page_bytes()) as live:

            def on_step() -> None:
                running = len(self._llm.engine.scheduler.running)
                self._max_running = max(self._max_running, running)
                live.show(len(found), self._llm.stats)

            driver = Driver(self._llm, window=len(QUESTIONS), on_step=on_step)
            for job, output in driver.run(iter(self._jobs())):
                if isinstance(output, QuireError):
                    raise output
                found[job.key] = output
        return [found[key] for key in range(len(QUESTIONS))]

    def _jobs(self) -> list[ClientJob]:
        return [
            ClientJob(
                key=key,
                request=GenerationRequest([], self._params),
                messages=[{"role": "user", "content": question.prompt()}],
            )
            for key, question in enumerate(QUESTIONS)
        ]

    def _chat(self) -> list[RequestOutput]:
        messages: list[dict[str, str]] = []
        replies: list[RequestOutput] = []
        for turn in CHAT:
            messages.append({"role": "user", "content": turn.text})
            [reply] = self._llm.chat(messages, self._params)
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply.text})
        return replies

    def _page_bytes(self) -> int:
        model = self._llm.model
        return model.spec.kv_bytes(KVConfig().page_tokens, model.decoder.dtype.itemsize)


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


def show_demo(results: Mapping[Variant, DemoResult], exactness: Exactness) -> None:
    """Print the answers with full KV, one row per use of the memory, and all wrong answers."""
    console = Console()
    full = results[FULL]
    for question, answer in zip(QUESTIONS, full.answers, strict=True):
        console.print(f"[bold]{escape(question.text)}[/] {escape(_line(answer.text))}")
    for turn, reply in zip(CHAT, full.chat, strict=True):
        console.print(f"[bold]> {escape(turn.text)}[/] {escape(_line(reply.text))}")
    total = format_size(full.stats.kv_total_bytes)
    table = Table(
        title=f"{len(QUESTIONS)} questions about {len(DOCUMENTS)} documents and a chat, in the "
        f"same {total} of KV memory",
        title_justify="left",
    )
    table.add_column("KV memory", overflow="fold")
    for column in ("requests at once", "tokens/s of answers", "peak KV", "prefix hits", "right"):
        table.add_column(column, justify="right", overflow="fold")
    for variant, result in results.items():
        claims = result.claims()
        table.add_row(
            variant.title,
            f"{claims['max_running']}",
            f"{claims['completion_tokens_per_s']:,.1f}",
            format_size(result.stats.kv_peak_bytes),
            f"{claims['cached_tokens'] / claims['prompt_tokens']:.0%}",
            f"{claims['right']} of {claims['answers']}",
        )
    console.print(table)
    console.print(_caption(results), highlight=False)
    for variant, result in results.items():
        questions, outputs = [*QUESTIONS, *CHAT], [*result.answers, *result.chat]
        for question, output, right in zip(questions, outputs, result.right, strict=True):
            if not right:
                console.print(
                    f"[red]wrong with {variant.title}:[/] {escape(question.text)} "
                    f"{escape(_line(output.text))}"
                )
    console.print(_comparison(exactness))


def _line(text: str) -> str:
    return " ".join(text.split())


def _caption(results: Mapping[Variant, DemoResult]) -> str:
    full = results[FULL].claims()
    faster = [
        variant.title
        for variant, result in results.items()
        if full["right"]
        and result.claims()["completion_tokens_per_s"] > full["completion_tokens_per_s"]
        and result.claims()["right"] >= full["right"]
    ]
    verdict = ", ".join(faster) if faster else "none"
    return (
        f"More tokens/s than full KV with as many right answers: {verdict}. Eviction is --evict "
        f"'{_EVICT}'. Prefix hits are prompt tokens whose KV another request had computed."
    )


def _comparison(exactness: Exactness) -> str:
    same = f"{exactness.equal} of {exactness.checked} outputs are equal token by token"
    if exactness.ties:
        same += f", {exactness.ties} up to a tie (two logits within {TIE_LOGITS:g})"
    style = "green" if exactness.passed else "bold red"
    return f"[{style}]full KV compared with Transformers in float32: {same}[/]"
