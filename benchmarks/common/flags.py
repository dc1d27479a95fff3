"""Options shared by several benchmarks."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quire.config.kv_config import AttentionName

AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result as one line of JSON; texts go to standard error."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for tables (Markdown, CSV), pictures and the result as JSON."),
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: PyTorch's default.")]
Attention = Annotated[AttentionName, typer.Option(help="Attention backend.")]


def parts_option(*names: str) -> Any:
    """The option --parts of a benchmark with these parts."""
    return typer.Option(help=f"Comma-separated parts: {', '.join(names)}; default: all.")


def quick_option(what: str) -> Any:
    """The option --quick.

    Args:
        what: what is smaller, as a sentence.
    """
    return typer.Option("--quick", help=f"{what} No claims.")
