"""Which machine this is, as far as measured rates depend on it."""

import platform
from importlib import metadata
from pathlib import Path

from quire.plan.ceilings import Machine


def this_machine(threads: int) -> Machine:
    """What measured ceilings of this machine depend on.

    Args:
        threads: torch's.
    """
    version = package_version("torch") or "without metadata"
    return Machine(cpu=cpu_model(), threads=threads, torch=version)


def package_version(package: str) -> str | None:
    """Version of a package from its metadata: nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
