"""Whether a built library is whole and for this machine, judged before it is loaded.

Loading a file that was cut short or altered can end the process, so its bytes are compared first
with what the build wrote beside it (see setup.py):

    _attention.cpython-311-x86_64-linux-gnu.so
    _attention.cpython-311-x86_64-linux-gnu.so.json   {"sha256": "...", "machine": "x86_64"}
"""

import hashlib
import json
import platform
from pathlib import Path

DIGEST_SUFFIX = ".json"
_REMEDY = "reinstall Quire to build it again"
_PROCESS = Path("/proc/self/exe")  # Linux only
_ELF = b"\x7fELF"
_HEADER_BYTES, _CLASS_AND_ORDER, _MACHINE = 20, slice(4, 6), slice(18, 20)  # of an ELF header


def unfit_reason(path: Path) -> str | None:
    """Why a library must not be loaded; None where nothing speaks against it.

    Args:
        path: of the library; the build's digest stands beside it.
    """
    beside = path.with_name(path.name + DIGEST_SUFFIX)
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"it cannot be read ({error.strerror}); {_REMEDY}"
    try:
        built = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return f"{beside.name}, which the build writes, is missing; {_REMEDY}"
    except (OSError, ValueError) as error:
        return f"{beside.name} cannot be read ({error}); {_REMEDY}"
    if not isinstance(built, dict) or built.get("sha256") != hashlib.sha256(content).hexdigest():
        return f"it is not what was built, but cut short or altered; {_REMEDY}"
    if built.get("machine") != platform.machine():
        return (
            f"it was built for {built.get('machine')}, this is {platform.machine()}; {_REMEDY} here"
        )
    return _foreign_reason(content)


def _foreign_reason(content: bytes) -> str | None:
    """What dlopen would only call a missing file: code for another kind of process."""
    try:
        with _PROCESS.open("rb") as file:
            ours = file.read(_HEADER_BYTES)
    except OSError:
        return None
    if not content.startswith(_ELF) or len(content) < _HEADER_BYTES:
        return f"it is no library of this system; {_REMEDY}"
    if any(content[part] != ours[part] for part in (_CLASS_AND_ORDER, _MACHINE)):
        return f"it holds code for another kind of processor; {_REMEDY} here"
    return None
