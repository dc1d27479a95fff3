"""Output of `quire demo`: two examples, a table, and the comparison with Transformers."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.demo_run import DemoResult, Variant
from quire.cli.demo_work import DemoPrompt
from quire.cli.exactness import TIE_LOGITS, Exactness
from quire.layout.sizes import format_size
from quire.sampling.outputs import RequestOutput

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
