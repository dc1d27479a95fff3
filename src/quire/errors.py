"""Every exception Quire raises on purpose.

    QuireError
    ├── ConfigError (ValueError)        an option is wrong; raised before memory is taken
    │   ├── UnknownName                 no such policy, codec, option, ...; offers the nearest names
    │   ├── TraceError                  a trace file that cannot be read; names the line
    │   ├── UnsoundCombination          two choices that cannot give right answers together
    │   └── UnsupportedModel            a model whose attention Quire cannot hold in pages
    ├── ModelError (ValueError)         a model folder that cannot be read
    ├── RequestError (ValueError)       one request is wrong; the others go on
    │   └── NeverFits                   one request needs more KV than the whole pool has
    ├── OutOfPages                      the arena is full now; the scheduler makes room or waits
    ├── HostPoolFull                    the host pool is full now; who is thrown out is read again
    ├── SlabFull                        a dense slab would pass the columns it may have
    ├── OffloadError                    KV outside the device could not be had or kept
    │   ├── LinkStalled                 an operation of a step did not end in time; names it
    │   ├── StorageError                a tier cannot take or give bytes now: full, unreachable
    │   └── CorruptData                 what a tier holds is not what was stored; it is dropped
    ├── EngineDead                      the step loop has ended; no request is taken any more
    ├── PolicyError                     an eviction policy broke its contract; its request fails
    └── InvariantError                  Quire's own bookkeeping is wrong: a bug, please report it

A message says what was expected, what was got, and how to change it.
"""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, choices: Sequence[str]) -> list[str]:
    """Up to three choices that are written like a name, whatever its case."""
    near = [
        found
        for written in (name, name.lower())
        for found in difflib.get_close_matches(written, choices, n=3)
    ]
    return list(dict.fromkeys(near))[:3]


class QuireError(Exception):
    """Base of everything Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An option is wrong. Nothing was allocated yet."""


class UnknownName(ConfigError):
    """A name that is not registered; the message offers the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        near = nearest(name, choices)
        hint = f"choose from {', '.join(choices)}" if choices else "there is none; leave it out"
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        super().__init__(f"unknown {kind} {name!r}: {hint}")
        self.kind = kind
        self.name = name


class TraceError(ConfigError):
    """A file of recorded requests that cannot be read; the message names the line."""


class UnsoundCombination(ConfigError):
    """Two choices that are right alone and wrong together."""


class UnsupportedModel(ConfigError):
    """A model whose attention Quire cannot hold in pages, and why."""


class ModelError(QuireError, ValueError):
    """A model folder that cannot be read."""


class RequestError(QuireError, ValueError):
    """One request is wrong. It is refused or fails; the others go on.

    Attributes:
        param: name of the field that is wrong; None where no single field is.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(RequestError):
    """A request that needs more KV bytes than the whole pool has, even alone."""


class OutOfPages(QuireError):
    """The arena cannot give the pages asked for now. Nothing was changed."""


class HostPoolFull(QuireError):
    """The host pool cannot take the pages of what is to be swapped out. Nothing was changed."""


class SlabFull(QuireError):
    """A dense slab needs more columns than it may have. Nothing was changed."""


class OffloadError(QuireError):
    """KV outside the device could not be had or kept. Whoever asked computes it again."""


class LinkStalled(OffloadError):
    """An operation of a step did not end in time; the message names it."""


class StorageError(OffloadError):
    """A tier cannot take or give bytes now: it is full, read-only, or cannot be reached."""


class TierFull(StorageError):
    """A tier has no room for what is to be written; what it holds is still there."""


class TierUnreachable(StorageError):
    """A tier on another machine did not answer in time, as often as it was asked."""


class CorruptData(OffloadError):
    """What a tier holds is not what was stored. It is dropped; nobody is given it."""


class EngineDead(QuireError):
    """The engine's step loop has ended, by `close` or by an error. Every open request gets this."""


class PolicyError(QuireError):
    """An eviction policy returned something that breaks its contract."""


class InvariantError(QuireError):
    """Quire's own bookkeeping contradicts itself."""
