"""Location of a model's files: inside a package, in a local folder or file, or on the hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from quire.errors import ModelError, nearest
from quire.layout.config import shown
from quire.layout.packaged import NAMES, PACKAGED_MODEL, file_of

_PACKAGED_FOLDER = Path(__file__).parents[1] / "assets" / PACKAGED_MODEL
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
WHOLE_MODEL = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
GGUF = ".gguf"
CONFIG_ONLY = ("config.json",)
"""Files that a plan needs of a model on the hub."""


def find_model(path: str | Path, *, wanted: Sequence[str] = WHOLE_MODEL) -> tuple[Path, str]:
    """Resolve a model name or path to a folder or a GGUF file.

    Args:
        path: "quire-tiny" or "smollm2" (exactly this text), a local folder, a GGUF file, or a name
            on the hub. A local folder takes precedence over the hub; "./quire-tiny" is a local
            folder.
        wanted: patterns of the files to fetch from the hub.

    Returns:
        The folder or file (of "smollm2" a GGUF file), and a short display name.

    Raises:
        ModelError: there is no such folder or file, the package of "smollm2" is not installed, or
            the hub cannot be reached or does not have the model.
    """
    if isinstance(path, str) and not path.strip():
        raise ModelError(
            "expected a model folder, a hub name such as organisation/model, or "
            f"{PACKAGED_MODEL!r}, got an empty name"
        )
    if path == PACKAGED_MODEL:
        return _PACKAGED_FOLDER, PACKAGED_MODEL
    file = file_of(path)
    if str(file).endswith(GGUF):
        return _gguf_file(file), str(path) if path in NAMES else Path(file).stem
    folder = _local_folder(path)
    if folder is not None:
        return folder, folder.resolve().name
    is_file = _is_file(path)
    if is_file or isinstance(path, Path) or not _HUB_NAME.fullmatch(path) or path.startswith("."):
        what = "it is a file, not a model folder" if is_file else "there is no such folder"
        raise ModelError(
            f"expected a model folder, got {_named(path)}: {what}; pass "
            f"a local folder, a hub name such as organisation/model, or {PACKAGED_MODEL!r}"
        )
    return download(path, wanted), path


def _named(path: str | Path) -> str:
    """The name of a missing model, with the short names of a similar spelling."""
    near = nearest(str(path), NAMES)
    return shown(str(path)) + (f" (did you mean {' or '.join(near)}?)" if near else "")


def _gguf_file(path: str | Path) -> Path:
    if not _is_file(path):
        raise ModelError(
            f"expected a GGUF file, got {shown(str(path))}: there is no such file; GGUF files are "
            "not downloaded from the hub"
        )
    return Path(path).expanduser()


def _local_folder(path: str | Path) -> Path | None:
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, or no path at all
        return None


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # as in `_local_folder`
        return False


def download(
    name: str, wanted: Sequence[str] = WHOLE_MODEL, *, revision: str | None = None
) -> Path:
    """Download files of a model on the hub; files that are cached are not downloaded again.

    Args:
        name: name on the hub.
        wanted: patterns of the files.
        revision: branch, tag or commit; None: the main branch.

    Raises:
        ModelError: the hub cannot be reached, or does not have the model.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"there is no folder {_named(name)}, and the model could not be downloaded from the "
            f"hub ({reason}); download it on a machine with network access and pass its folder, or "
            f"use {PACKAGED_MODEL!r}"
        ) from error
