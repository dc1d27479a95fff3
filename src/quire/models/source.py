"""Where a model's files are: inside the package, in a local folder, or on the hub."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from quire.errors import ModelError

PACKAGED = "quire-tiny"
_PACKAGED_FOLDER = Path(__file__).parents[1] / "assets" / PACKAGED
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def find_model(path: str | Path) -> tuple[Path, str]:
    """Resolve what a user calls a model.

    Args:
        path: "quire-tiny" (exactly this text), a local folder, or a name on the hub. A local folder
            wins over the hub; "./quire-tiny" is a local folder.

    Returns:
        The folder, and a short name for people.

    Raises:
        ModelError: there is no such folder, and the hub cannot be reached or does not have it.
    """
    if path == PACKAGED:
        return _PACKAGED_FOLDER, PACKAGED
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if isinstance(path, Path) or not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise ModelError(
            f"expected a model folder, got {str(path)!r}: there is no such folder; give a local "
            f"folder, a hub name such as organisation/model, or {PACKAGED!r}"
        )
    return _download(path), path


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"there is no folder {name!r} here, and the hub did not give such a model ({reason}); "
            f"download it where there is a network and give its folder, or use {PACKAGED!r}"
        ) from error
