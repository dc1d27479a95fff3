"""A folder that several processes use: a lock, and whether other hosts share its file system."""

import contextlib
import fcntl
import os
from pathlib import Path

from quire.errors import StorageError

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "overlay"),
        *("ramfs", "reiserfs", "tmpfs", "xfs", "zfs"),
    }
)
_MOUNTS = Path("/proc/self/mounts")


class FolderLock:
    """A lock that every process holds while it uses a folder.

    Args:
        folder: created if missing.

    Attributes:
        is_alone: whether no other process uses the folder; then none can start until `share`.

    Raises:
        StorageError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(
                f"cannot write {folder}: {error.strerror}; name another folder"
            ) from error
        self.is_alone = False
        with contextlib.suppress(OSError):  # in use, or a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_alone = True
        if not self.is_alone:
            self.share()

    def share(self) -> None:
        """Let other processes start."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)


def is_on_network(folder: Path) -> bool:
    """Whether other hosts may use the file system of a folder; True if that is unknown."""
    return _file_system(folder) not in _LOCAL_FILE_SYSTEMS


def _file_system(folder: Path) -> str:
    """Type of the file system of a folder; "" if it is unknown, as outside of Linux."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "apfs" if os.uname().sysname == "Darwin" else ""
    path, best, found = folder.resolve(), -1, ""
    for line in lines:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= best:
            best, found = len(mount), kind
    return found
