"""Options that many commands share, each with one name and one sentence."""

import os
from typing import Annotated

import typer

from quire.config.kv_config import AttentionName
from quire.errors import ConfigError

PACKAGED_MODEL = "quire-tiny"
ABOUT_MODEL = (
    "A model folder in Hugging Face format, a hub name, or quire-tiny, which is in this package."
)

_MOST_THREADS_PER_CPU = 8
_LEAST_LIMIT = 64

AsJson = Annotated[
    bool, typer.Option("--json", help="End with one line of JSON on standard output.")
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads, 0: as torch takes.")]
Attention = Annotated[
    AttentionName, typer.Option(help="Backend that computes attention over pages.")
]


def use_threads(threads: int) -> None:
    """Let torch take so many threads; 0 leaves it alone.

    Raises:
        ConfigError: a negative number, or many more threads than this machine has CPUs.
    """
    import torch

    num_cpus = os.cpu_count() or 1
    most = max(_LEAST_LIMIT, _MOST_THREADS_PER_CPU * num_cpus)
    if not 0 <= threads <= most:
        raise ConfigError(
            f"expected --threads from 0 (as many as torch takes) to {most}, got {threads}: this "
            f"machine has {num_cpus} CPUs"
        )
    if threads:
        torch.set_num_threads(threads)


def refuse_no_name(model: str | None) -> None:
    """Refuse a model without a name; None stands for the command's default.

    Raises:
        ConfigError: an empty text, such as of a variable that is not set.
    """
    if model is not None and not model.strip():
        raise ConfigError(
            "expected a model folder, a hub name or quire-tiny, got an empty name; give a name, or "
            "leave the model out for the default"
        )
