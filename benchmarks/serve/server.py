"""A `quire serve` process."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.errors import ConfigError


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[str]:
    """Run a server on a free port of this machine, and yield its URL.

    Args:
        model: folder of the model.
        options: further options of `quire serve`.

    Raises:
        ConfigError: the server ended before it was ready.
    """
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "stdout is a pipe"
    try:
        lines = map(re.compile(r" at (https?://\S+)/v1").search, process.stdout)
        ready = next((line for line in lines if line), None)
        if ready is None:
            raise ConfigError(f"{' '.join(command)} ended before it was ready; see its output")
        yield ready[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
