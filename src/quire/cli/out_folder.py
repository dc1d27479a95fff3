"""Writes the result files of a command to a folder, each atomically."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ConfigError


def prepare_folder(folder: Path) -> None:
    """Create a folder for results and check that it is writable, before a long computation.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files atomically: readers see the old or the new content of each file.

    Args:
        folder: an existing folder.
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # only the owner can read a temporary file
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror}; name another folder with --out")
