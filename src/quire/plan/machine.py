"""The machine: its identity, and the memory that a container allows this process."""

import contextlib
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from quire.plan.ceilings import Machine

# Identity of the machine, as far as measured rates depend on it.


def this_machine(threads: int) -> Machine:
    """The identity of this machine for stored ceilings."""
    version = package_version("torch") or "without metadata"
    return Machine(cpu=cpu_model(), threads=threads, torch=version)


def package_version(package: str) -> str | None:
    """Version of a package from its metadata: nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# Memory limits of a container's control groups.
#
# The machine's free memory does not include them; the system kills a process that exceeds one.
#
#     version 2   /sys/fs/cgroup/<group>/memory.max, memory.current, memory.stat: inactive_file
#     version 1   /sys/fs/cgroup/memory/<group>/memory.limit_in_bytes, memory.usage_in_bytes, ...
#
# A limit applies to a group and all groups below it, so all groups from the process's group to the
# root are checked.

_MOUNT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes the largest multiple of a page
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def container_free_bytes(mount: Path = _MOUNT, own_groups: Path = _OWN_GROUPS) -> int | None:
    """Bytes that the control groups still allow this process; None without a limit."""
    return min((limit - used for limit, used in _limits(mount, own_groups)), default=None)


def free_host_bytes() -> int:
    """Bytes of free host memory, within the limits of a container."""
    free_bytes = int(psutil.virtual_memory().available)
    contained = container_free_bytes()
    return free_bytes if contained is None else min(free_bytes, max(0, contained))


def container_total_bytes(mount: Path = _MOUNT, own_groups: Path = _OWN_GROUPS) -> int | None:
    """The smallest memory limit of the control groups in bytes; None without a limit."""
    return min((limit for limit, _ in _limits(mount, own_groups)), default=None)


def _limits(mount: Path, own_groups: Path) -> Iterator[tuple[int, int]]:
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _of_groups(mount, group, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            yield from _of_groups(mount / "memory", group, _V1_FILES)


def _of_groups(root: Path, group: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    # in a container, /proc may show the group's name outside of it; the mount's root is that group
    own = root / group.strip("/")
    folders = [own, *own.parents]
    for folder in folders[: folders.index(root) + 1] if root in folders else [root]:
        limit, used = (_number(folder / name) for name in names[:2])
        if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
            yield limit, max(0, used - _cached_bytes(folder / "memory.stat", names[2]))


def _cached_bytes(stat: Path, key: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        return int(path.read_text(encoding="utf-8"))
    return None
