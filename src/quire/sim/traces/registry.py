"""Registry of trace formats, and detection of a file's format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, TraceError, UnknownName
from quire.sim import traces
from quire.sim.traces.base import AUTO, TraceRequest
from quire.sim.traces.reading import opened

_HEAD_CHARACTERS = 4096

Reader = Callable[[Path, str | None], Iterator[TraceRequest]]  # (file, column of the tenant)
Recogniser = Callable[[str], bool]  # of the beginning of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A trace format."""

    name: str
    about: str
    timed: bool  # whether the format has arrival times
    recognises: Recogniser  # from the beginning of a file
    read: Reader  # in file order


_FORMATS: dict[str, TraceFormat] = {}


def trace_format(
    name: str, *, about: str, timed: bool, recognises: Recogniser
) -> Callable[[Reader], Reader]:
    """Register a function that reads a format."""

    def put(read: Reader) -> Reader:
        if name == AUTO or name in _FORMATS:
            raise ConfigError(f"two trace formats are called {name!r}")
        _FORMATS[name] = TraceFormat(
            name=name, about=about, timed=timed, recognises=recognises, read=read
        )
        return read

    return put


def formats() -> Mapping[str, TraceFormat]:
    """All formats by name."""
    traces.load_all()
    return dict(sorted(_FORMATS.items()))


def find_format(name: str, path: Path) -> TraceFormat:
    """A format by its name, or `auto`: the one that recognises the file."""
    known = formats()
    if name != AUTO:
        if name not in known:
            raise UnknownName("trace format", name, (AUTO, *known))
        return known[name]
    with opened(path) as file:
        head = file.read(_HEAD_CHARACTERS).lstrip()
    if not head:
        raise TraceError(f"{path.name} is empty: expected requests")
    for found in known.values():
        if found.recognises(head):
            return found
    raise TraceError(
        f"{path.name} is in no known format ({', '.join(known)}): it begins with "
        f"{head.splitlines()[0][:60]!r}; name the format with --trace-format"
    )
