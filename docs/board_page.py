"""Copy the leaderboard of quire-tiny to the documents.

    bash runs/board.sh                       writes out/board
    python -m docs.board_page out/board      writes docs/board-measured.md, its chart and its rows

The interactive page, board.html, contains plotly and is not copied.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cli.out_folder import write_files
from quire.evals.board.pages import CHART_FILE, PAGE_FILE

DOCS = Path(__file__).resolve().parent
PAGE, CHART, ROWS = "board-measured.md", "images/board.svg", "results/board.json"


def main(arguments: Sequence[str], docs: Path = DOCS) -> None:
    """Copy page, chart and rows from the folder of `quire board`."""
    [folder] = map(Path, arguments)
    run = json.loads((folder / "board.json").read_text(encoding="utf-8"))
    text = (folder / PAGE_FILE).read_text(encoding="utf-8")
    files = {
        PAGE: page(text, run).encode(),
        CHART: (folder / CHART_FILE).read_bytes(),
        ROWS: (json.dumps(run, indent=1) + "\n").encode(),
    }
    write_files(docs, files)


def page(text: str, run: Mapping[str, Any]) -> str:
    """The page of a run, with the command and the machine below its heading."""
    heading, _, rest = text.partition("\n")
    config, hardware = run["config"], run["hardware"]
    made = (
        f"`bash runs/board.sh` ([guide](guides/board.md)), commit {run['commit'][:7]}, "
        f"torch {run['versions']['torch']}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"{config['loading']['dtype']}, {config['kv']['memory']:,} B of KV memory. The folder of "
        "the command also has an interactive page."
    )
    return f"{heading}\n\n{made}\n{rest.replace(f']({CHART_FILE})', f']({CHART})')}"


if __name__ == "__main__":
    main(sys.argv[1:])
