"""`quire generate`: streams the output of one prompt."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import json_option
from quire.cli.kv_events import KVWatch, kv_events_option, watching
from quire.cli.report import print_json
from quire.cli.settings import Settings, with_settings
from quire.errors import RequestError
from quire.layout.options import option
from quire.layout.packaged import NAMES, PACKAGED_MODEL
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.sampling.outputs import RequestOutput, Usage

_HOW_TO_PROMPT = (
    "give a text as in quire generate MODEL PROMPT, with --prompt, or on standard input"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """Options of `quire generate`."""

    prompt_option: str | None = option(
        None,
        help="The prompt, instead of the argument.",
        flag="prompt",
        synonyms=("p",),
        common=True,
    )
    kv_events: Path | None = kv_events_option()
    as_json: bool = json_option()


@with_settings(defaults={"max-tokens": 128})
def generate(
    settings: Settings,
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt. Default: --prompt, else standard input. A single text is the prompt "
            "if --config names the model.",
            show_default=False,
        ),
    ] = None,
    flags: GenerateFlags,
) -> None:
    """Generate from one prompt.

    The text goes to standard output; token counts, times and KV memory to standard error.
    """
    if not settings.sampling.max_tokens:
        raise RequestError(
            "expected --max-tokens of 1 or more, got 0: to score a prompt, use prompt_logprobs in "
            "Python or in a request to quire serve"
        )
    settings = settings.for_one_request()
    if prompt is None and flags.prompt_option is None:
        settings, prompt = _with_model_of_file(settings)
    text = _prompt(settings, prompt, flags.prompt_option)
    with watching(flags.kv_events) as watch:
        output = _stream(settings, text, watch)
        of_memory = " or a larger --kv-memory" * (output.usage.max_tokens_limit == "kv_memory")
        note = end_note(
            output,
            "--max-tokens N raises it",
            f"a shorter prompt{of_memory} leaves more",
            "--min-tokens N makes it go on, and quire chat applies the model's chat template",
        )
        typer.echo(note, err=True, nl=bool(note))
        # a rule that failed has not evicted, though it was needed
        evict = settings.kv.evict if output.error is None else "full"
        typer.echo(usage_line(output.usage, evict), err=True)
        if flags.as_json:
            print_json(_object(settings, output))
        if output.error is not None:
            raise RequestError(output.error)


def usage_line(usage: "Usage", evict: str) -> str:
    """Token counts, times and KV memory of a request on one line; evictions if a rule is set."""
    evicted = "" if evict.strip() == "full" else f", {usage.evicted_tokens} tokens evicted"
    if evicted and not usage.evicted_tokens:
        evicted += f" (no eviction was needed under {evict!r})"
    return (
        f"[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} output tokens, "
        f"time to first token {1000 * usage.first_token_s:,.0f} ms, total {usage.total_s:.2f} s, "
        f"{format_size(usage.kv_peak_bytes)} of KV{evicted}]"
    )


def end_note(output: "RequestOutput", raising: str, freeing: str, going_on: str) -> str:
    """A line about an output that has no text or ended at its maximum length; else empty.

    Args:
        output: a finished output.
        raising: how to raise `max_tokens`.
        freeing: how to free what lowered it: the context, or the KV memory.
        going_on: how to get a text from a model that ends the output at once.
    """
    if all(choice.finish_reason == "stop" and not choice.text for choice in output.choices):
        return f"[no text: the output ended at once; {going_on}]"
    if all(choice.finish_reason != "length" for choice in output.choices):
        return ""
    usage = output.usage
    limit = usage.max_tokens_limit.replace("kv_", "KV ").replace("_", " ")
    change = f", the rest of the {limit}: {freeing}" if limit else f": {raising}"
    return f"[cut at max_tokens={usage.max_tokens}{change}]"


def _prompt(settings: Settings, argument: str | None, option: str | None) -> str:
    if argument is not None and option is not None:
        raise RequestError(f"two prompts, {argument!r} and --prompt {option!r}: leave one out")
    text = option if argument is None else argument
    if text is None:
        _refuse_prompt_as_model(settings.model)
        text = _standard_input()
    if not text:
        raise RequestError(f"the prompt is empty: {_HOW_TO_PROMPT}")
    return text


def _with_model_of_file(settings: Settings) -> tuple[Settings, str | None]:
    """Take a single text as the prompt if the file names the model, unless it is a model too."""
    text, of_file = settings.model, settings.file_model
    if of_file in (None, text) or text in NAMES or os.path.exists(text):
        return settings, None
    return replace(settings, model=of_file), text


def _refuse_prompt_as_model(model: str) -> None:
    """Refuse a name with spaces that is not a folder: it is probably the prompt."""
    if len(model.split()) > 1 and not os.path.exists(model):
        raise RequestError(
            f"expected a model as the first argument, got {model!r}: use quire generate "
            f"{PACKAGED_MODEL} {shlex.quote(model)}"
        )


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise RequestError(f"no prompt: {_HOW_TO_PROMPT}")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")  # added by echo and editors


def _stream(settings: Settings, text: str, watch: KVWatch) -> "RequestOutput":
    settings.refuse_other_tenants()
    llm = settings.open_llm()
    watch.follow(llm)
    from quire.sampling.outputs import OutputBuilder  # imports torch

    token_ids = llm.encode(text)
    builder = OutputBuilder("generate", tuple(token_ids))
    several = settings.sampling.n > 1
    for delta in llm.stream(token_ids, settings.sampling, limit_max_tokens=True):
        if not several:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
        output = builder.add(delta)
        if output is not None:
            break
    typer.echo("" if not several else _side_by_side(output))
    assert output is not None, "a stream ends with a finish reason"
    return output


def _side_by_side(output: "RequestOutput | None") -> str:
    """All choices, each after a line with its index and its score, if any."""
    parts = []
    for choice in () if output is None else output.choices:
        score = "" if choice.score is None else f", score {choice.score:.3f}"
        parts.append(f"[{choice.index}{score}]\n{choice.text}")
    return "\n".join(parts)


def _object(settings: Settings, output: "RequestOutput") -> dict[str, object]:
    return {
        "name": "generate",
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error,
        "choices": [
            {
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "score": choice.score,
            }
            for choice in output.choices
        ],
        "usage": output.usage.as_dict(),
        "config": settings.as_dict(),
    }
