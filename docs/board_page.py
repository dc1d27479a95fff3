"""Copy the leaderboards of quire-tiny to the documents.

    bash runs/board.sh                          writes out/board
    bash runs/redundant.sh                      writes out/redundant
    python -m docs.board_page out/board         writes docs/board-measured.md, chart and rows
    python -m docs.board_page out/redundant     writes docs/redundant-measured.md, chart and rows

Further words are added to the line about the machine. The interactive page, board.html, contains
plotly and is not copied.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cli.out_folder import write_files
from quire.evals.board.pages import CHART_FILE, PAGE_FILE

DOCS = Path(__file__).resolve().parent
HEADINGS = {
    "board": "Leaderboard of eviction rules and codecs, measured with quire-tiny",
    "redundant": "Eviction rules on tasks with redundancy, measured with quire-tiny",
}


def main(arguments: Sequence[str], docs: Path = DOCS) -> None:
    """Copy page, chart and rows from the folder of `quire board`."""
    folder, note = Path(arguments[0]), " ".join(arguments[1:])
    name = folder.name
    run = json.loads((folder / "board.json").read_text(encoding="utf-8"))
    text = (folder / PAGE_FILE).read_text(encoding="utf-8")
    files = {
        f"{name}-measured.md": page(text, run, name, note).encode(),
        f"images/{name}.svg": (folder / CHART_FILE).read_bytes(),
        f"results/{name}.json": (json.dumps(run, indent=1) + "\n").encode(),
    }
    write_files(docs, files)


def page(text: str, run: Mapping[str, Any], name: str, note: str = "") -> str:
    """The page of a run under its own heading, with the command and the machine."""
    _, _, rest = text.partition("\n")
    config, hardware = run["config"], run["hardware"]
    made = (
        f"`bash runs/{name}.sh` ([guide](guides/board.md)), commit {run['commit'][:7]}, "
        f"torch {run['versions']['torch']}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"{config['loading']['dtype']}, {config['kv']['memory']:,} B of KV memory. The folder of "
        f"the command also has an interactive page. {note}"
    )
    rest = rest.replace(f"]({CHART_FILE})", f"](images/{name}.svg)")
    return f"# {HEADINGS[name]}\n\n{made.rstrip()}\n{rest}"


if __name__ == "__main__":
    main(sys.argv[1:])
