"""`python -m benchmarks paper`: a paper's tables and figures, with Quire's values beside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import finish, names_of, show_parts
from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import ABOUT_MODEL, PACKAGED_MODEL, refuse_no_name
from quire.cli.options import Dtype, ModelConfig
from quire.cli.report import commit, envelope, prepare_folder, print_json
from quire.cli.settings import Settings
from quire.cli.tables import show_table
from quire.errors import ConfigError
from quire.layout.extras import require_extra
from quire.layout.options import option_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.common.result import PartResult
    from benchmarks.paper.item import ItemResult
    from benchmarks.paper.material import Material
    from benchmarks.paper.papers import Paper


def paper(  # noqa: PLR0913 - one parameter per option
    paper_id: Annotated[
        str, typer.Argument(metavar="ID", help="Number of the paper: 000, 001, 002, 003 or 004.")
    ],
    *,
    model: Annotated[
        str, typer.Option(help=f"{ABOUT_MODEL} Or random:SHAPE, for random weights.")
    ] = PACKAGED_MODEL,
    items: Annotated[
        str, typer.Option(help="Comma-separated tables and figures; default: all. See --list.")
    ] = "",
    list_items: Annotated[
        bool, typer.Option("--list", help="List the tables and figures, and run nothing.")
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Examples as TASK=FILE, JSON or JSON lines: gsm8k, xsum, cnndm, narrativeqa, "
            "mmlu, or a LongBench data set. Can be repeated."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file for perplexity; default: the books shipped with Quire."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Prompts of each task; default: 0, each item's own number.")
    ] = 0,
    layers: Annotated[
        int,
        typer.Option(
            min=0, help="Layers of random weights (--model random:SHAPE); default: 0, all layers."
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, pictures and the result. Finished items are stored there, so "
            "that an interrupted run can continue."
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of weights: auto (as stored), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the model with Transformers' own attention at load.",
        ),
    ] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model folder.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short lengths and few prompts; rows are marked as scaled."),
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the tables and figures of a paper on a model, beside the paper's values.

    Every row is marked as reproduced, scaled (with the differences) or not comparable (with the
    reason).
    """
    from benchmarks.paper.papers import paper_named
    from benchmarks.paper.runs import counts_of, items_table

    found = paper_named(paper_id)
    if list_items:
        table = items_table(found)
        show_table(table.caption, table.columns, [[*map(str, row)] for row in table.rows])
        if as_json:
            arms = {item.id: {"title": item.title, "status": item.status} for item in found.items}
            print_json(envelope("bench paper", {}, arms, {"paper": found.id}))
        return
    names = names_of(items, found.by_id, "item")
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    refuse_no_name(model)
    loading = ModelConfig(
        dtype=dtype,
        device=device,
        verify=verify,
        trust_remote_code=trust_remote_code,
        threads=threads,
    )
    settings = Settings(model=model, loading=loading)
    settings.set_threads()
    material = _material(settings, data or [], text, samples, layers, quick=quick)
    used = _used(found, material)
    done: list[ItemResult] = []
    results, _ = show_parts(_parts(found, names, material, used, out, done))
    named = {f"paper-{found.id}-{name}": result for name, result in results.items()}
    run = finish(f"paper-{found.id}", named, counts_of(done), used, out, quick=quick)
    if as_json:
        print_json(run)


def _material(
    settings: Settings,
    data: list[str],
    text: Path | None,
    samples: int,
    layers: int,
    *,
    quick: bool,
) -> "Material":
    """Inputs of the items.

    Raises:
        UnknownName: no such task or shape.
        ConfigError: an option without effect, or a task without a file.
    """
    from benchmarks.paper.material import Material
    from benchmarks.paper.shapes import shape

    material = Material(
        settings=settings,
        files=_files(data),
        text=text,
        samples=samples,
        layers=layers,
        quick=quick,
    )
    if material.random_shape is not None:
        shape(material.random_shape, layers)
    elif layers:
        raise ConfigError(
            f"--layers {layers} has no effect on {settings.model}: it is for random weights; leave "
            "it out, or use --model random:SHAPE"
        )
    return material


def _files(data: list[str]) -> "Mapping[str, Path]":
    """Parse `TASK=FILE` options, each task once.

    Raises:
        UnknownName: no such task.
        ConfigError: an option has no file, a missing file, or a task is given twice.
    """
    from benchmarks.paper.scores import checked_task

    found: dict[str, Path] = {}
    for text in data:
        name, _, path = text.partition("=")
        checked_task(name)
        if not path or name in found:
            raise ConfigError(f"expected each task once, as {name}=FILE, got --data {text!r}")
        if not Path(path).is_file():
            raise ConfigError(f"cannot read {path}: expected a file of examples of {name}")
        found[name] = Path(path)
    return found


def _parts(
    found: "Paper",
    names: tuple[str, ...],
    material: "Material",
    used: "Mapping[str, object]",
    out: Path | None,
    done: "list[ItemResult]",
) -> "Iterator[tuple[str, PartResult]]":
    """Yield every item as a part, and append its result to `done`."""
    from benchmarks.paper.runs import ItemFiles, part_of, run_items

    files = ItemFiles(out, found.id, dict(used) | {"commit": commit()})
    for result in run_items([found.by_id[name] for name in names], material, files):
        done.append(result)
        yield result.id, part_of(found.id, result)


def _used(found: "Paper", material: "Material") -> dict[str, object]:
    """The configuration, with the base names of files."""
    import torch

    return {
        "paper": found.id,
        "model": material.settings.model,
        "loading": option_values(material.settings.loading),
        "data": {task: path.name for task, path in material.files.items()},
        "text": "" if material.text is None else material.text.name,
        "samples": material.samples,
        "layers": material.layers,
        "quick": material.quick,
        "threads": torch.get_num_threads(),
    }
