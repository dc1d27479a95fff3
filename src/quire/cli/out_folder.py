"""Files that a command leaves in a folder: each whole or not at all."""

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ConfigError


def require_matplotlib(option: str) -> None:
    """Say before the work that its pictures could not be drawn.

    Args:
        option: of the command line that asks for them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} draws with matplotlib, which is not installed: pip install "
            f'"quire[report]", or leave {option} out'
        )


def prepare_folder(folder: Path) -> None:
    """Make a folder for results, before the work whose results it shall hold.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files; whoever reads meanwhile sees the old or the new one, whole.

    Args:
        folder: there already.
        files: name to content.

    Raises:
        ConfigError: a file cannot be written.
    """
    for name, content in files.items():
        try:
            _replace(folder / name, content)
        except OSError as error:
            raise _unwritable(folder / name, error) from error


def _replace(path: Path, content: bytes) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(part, 0o644)  # a temporary file is its maker's alone
        os.replace(part, path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror}; name another folder with --out")
