"""Options that many commands share, each with one name and one sentence."""

from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", help="End with one line of JSON on standard output.")
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads, 0: as torch takes.")]
Attention = Annotated[str, typer.Option(help="Who computes attention over pages.")]


def use_threads(threads: int) -> None:
    """Let torch take so many threads; 0 leaves it alone."""
    import torch

    if threads:
        torch.set_num_threads(threads)
