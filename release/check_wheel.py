"""Checks wheels and the sdist before an upload; needs the standard library only.

`python release/check_wheel.py dist/*` checks tags, digest and content of each file, and
`python release/check_wheel.py --installed` the library in this environment.
"""

import hashlib
import importlib.util
import json
import platform
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

LIBRARY = "quire/kernels/native/_attention.so"
WHEEL_NAME = re.compile(r"quire_llm-[^-]+-py3-none-(?P<platform>.+)\.whl")
IN_WHEEL = re.compile(r"quire/|quire_llm-[^/]+\.dist-info/")
IN_SDIST = re.compile(
    r"(deploy|src/quire|src/quire_llm\.egg-info)/.*|(setup|pyproject)\.(py|cfg|toml)|PKG-INFO|MANIFEST\.in"
    r"|LICENSE|NOTICE|(README|CHANGELOG|SECURITY)\.md"
)
NEEDED_IN_SDIST = ("setup.py", "pyproject.toml", "LICENSE", "NOTICE", "README.md", "CHANGELOG.md")


def faults_of(path: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel or an sdist."""
    if path.suffix == ".whl":
        yield from wheel_faults(path)
    elif path.name.endswith(".tar.gz"):
        yield from sdist_faults(path)
    else:
        yield "is neither a wheel nor an sdist"


def wheel_faults(path: Path) -> Iterator[str]:
    """Yield faults of a wheel: a tag without its library, a wrong digest, files out of place."""
    named = WHEEL_NAME.fullmatch(path.name)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        if named is None:
            yield "expected a name quire_llm-VERSION-py3-none-PLATFORM.whl"
        elif (named["platform"] != "any") != (LIBRARY in names):
            has = "has" if LIBRARY in names else "has not"
            yield f"is tagged {named['platform']} and {has} the library"
        if LIBRARY in names:
            built = json.loads(wheel.read(f"{LIBRARY}.json"))
            if built["sha256"] != hashlib.sha256(wheel.read(LIBRARY)).hexdigest():
                yield "has a library that was changed after the build: its digest differs"
    yield from (f"has {name}" for name in names if not IN_WHEEL.match(name))
    yield from (f"has {name}" for name in names if name.endswith((".c", ".h", ".pyc")))


def sdist_faults(path: Path) -> Iterator[str]:
    """Yield faults of an sdist: files missing for a build, or files out of place."""
    with tarfile.open(path) as sdist:
        files = [member.name.partition("/")[2] for member in sdist if member.isfile()]
    yield from (f"has {name}" for name in files if not IN_SDIST.fullmatch(name))
    yield from (f"has {name}" for name in files if name.endswith((".so", ".so.json", ".pyc")))
    yield from (f"has no {name}" for name in NEEDED_IN_SDIST if name not in files)
    for suffix in (".c", ".h"):
        if not any(name.endswith(suffix) for name in files):
            yield f"has no {suffix} files"


def installed_faults() -> Iterator[str]:
    """Yield faults of the installed package; does not import torch."""
    spec = importlib.util.find_spec("quire")
    if spec is None or not spec.submodule_search_locations:
        yield "is not installed"
        return
    library = Path(spec.submodule_search_locations[0], *LIBRARY.split("/")[1:])
    if not library.is_file():
        yield "has no library: the compiler failed"
        return
    built = json.loads(library.with_name(f"{library.name}.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    if built != {"sha256": digest, "machine": platform.machine()}:
        yield f"has a library that does not match its build: {built}"


def main(arguments: Sequence[str]) -> int:
    """Print the faults; return the exit code."""
    if list(arguments) == ["--installed"]:
        faults = [f"quire {fault}" for fault in installed_faults()]
    else:
        faults = [f"{name} {fault}" for name in arguments for fault in faults_of(Path(name))]
    sys.stdout.write("\n".join([*faults, f"{len(faults)} faults", ""]))
    return int(bool(faults) or not arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
