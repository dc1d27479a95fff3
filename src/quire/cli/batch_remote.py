"""`quire batch` on a server: its options, and the run."""

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from quire.batch.lines import BatchTask
from quire.batch.records import BatchTally
from quire.cli.batch_output import BatchOutput
from quire.cli.settings import Settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.batch_server import BatchServer

KEY_VARIABLE = "OPENAI_API_KEY"
_OF_ENGINE = ("model", "kv", "schedule")  # sections of options


def server_of(
    settings: Settings, base_url: str, api_key: str | None, max_concurrency: int, max_retries: int
) -> "BatchServer":
    """The server of a batch.

    Raises:
        ConfigError: an option of the engine, which the server has not, or an invalid URL or key.
    """
    from quire.cli.batch_server import BatchServer  # imports httpx

    engine = sorted(name for name in settings.given if name.partition("_")[0] in _OF_ENGINE)
    if engine:
        flag = engine[0].partition("_")[2].replace("_", "-")
        raise ConfigError(
            f"{flag} is an option of the engine and has no effect with --base-url: set it in the "
            "server, and leave it out"
        )
    if not _is_url(base_url):
        raise ConfigError(f"expected --base-url as http://HOST:PORT, got {base_url!r}")
    key = api_key or os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "expected a key of printable ASCII characters, got others: correct --api-key or the "
            f"environment variable {KEY_VARIABLE}"
        )
    return BatchServer(
        base_url=base_url,
        api_key=key,
        max_concurrency=max_concurrency,
        max_retries=max_retries,
    )


def _is_url(text: str) -> bool:
    """Whether a text is the URL of an HTTP server."""
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # not a port
        return False


def run_on_server(
    settings: Settings, server: "BatchServer", task: BatchTask, output: BatchOutput, left: int
) -> tuple[BatchTally, float]:
    """Send the remaining lines to a server; return the tally and the seconds."""
    from quire.cli.batch_server import ServerBatch  # imports httpx
    from quire.cli.progress import CountProgress

    typed = {name.removeprefix("sampling_") for name in settings.given}
    chosen = {name: value for name, value in asdict(task.sampling).items() if name in typed}
    defaults = {"max_tokens": task.sampling.max_tokens} | chosen
    start_s = time.monotonic()
    with CountProgress("batch", left) as progress:
        run = ServerBatch(server, task, output, settings.model, defaults, progress.count)
        try:
            run.run()
        except KeyboardInterrupt:
            typer.echo("interrupted: run the same command to resume", err=True)
            raise
    return run.tally, time.monotonic() - start_s
