"""Draws docs/images/memory.svg from a run of `quire demo --json`, and keeps that run's numbers.

    quire demo --json > demo.out
    python docs/make_picture.py demo.out       needs matplotlib, which Quire itself does not

The last line of the file is the run. Without its raw repeats it is kept as docs/results/demo.json,
which the numbers of the README are compared with in a test.
"""

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
MIB = 1024 * 1024


def main(path: Path) -> None:
    """Keep the numbers of a run and draw them."""
    run = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    kept = {key: value for key, value in run.items() if key != "arms"}
    text = json.dumps(kept, indent=2) + "\n"
    (DOCS / "results" / "demo.json").write_text(text, encoding="utf-8")
    draw(run["claims"], DOCS / "images" / "memory.svg")


def draw(claims: dict[str, float], path: Path) -> None:
    """Three bars: what the requests that ran at once take, by who hands out the memory."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "quire", "svg.fonttype": "none", "font.family": "sans-serif"}
    bars = [
        ("Quire: pages in use", claims["crowd_used_bytes"] / MIB, "#1a7f5a"),
        ("prompt + max_tokens\nreserved ahead", claims["crowd_reserved_bytes"] / MIB, "#9aa3ad"),
        ("whole context\nreserved ahead", claims["crowd_contiguous_bytes"] / MIB, "#9aa3ad"),
    ]
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    names, sizes, colours = zip(*reversed(bars), strict=True)
    drawn = axes.barh(names, sizes, color=colours, height=0.62)
    axes.bar_label(drawn, [f"{size:,.2f} MiB" for size in sizes], padding=4)
    memory = claims["kv_total_bytes"] / MIB
    axes.axvline(memory, color="#b3261e", linewidth=1, linestyle="--")
    axes.set_title(
        f"KV of the same {claims['most_running']} requests; dashed: the KV memory, {memory:g} MiB",
        fontsize=10,
        loc="left",
    )
    axes.set_xlim(0, max(sizes) * 1.18)
    axes.set_xlabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
