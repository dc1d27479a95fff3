"""The exceptions that Quire raises.

    QuireError
    ├── ConfigError (ValueError)        an invalid option; raised before memory is allocated
    │   ├── UnknownName                 an unknown policy, codec, option, ...; suggests close names
    │   ├── TraceError                  a trace file cannot be read; states the line
    │   ├── UnsoundCombination          two options cannot be combined
    │   └── UnsupportedModel            the model's attention is not supported with paged KV
    ├── ModelError (ValueError)         a model folder cannot be read
    ├── RequestError (ValueError)       one request is invalid or fails; others are unaffected
    │   └── NeverFits                   one request needs more KV than the whole KV memory
    ├── OutOfPages                      the arena has too few free pages now
    ├── HostMemoryFull                  the memory for swapped or offloaded KV is full now
    ├── SlabFull                        a dense slab needs more columns than its capacity
    ├── OffloadError                    KV outside of the device cannot be loaded or stored
    │   ├── StorageError                a tier cannot load or store bytes now: full, unreachable
    │   └── CorruptData                 stored data is damaged; it is deleted
    ├── QueueFull                       too many requests are waiting; try again later
    ├── EngineDead                      the engine's step loop has ended
    │   └── RankFailed                  a process of a tensor-parallel engine failed; states which
    ├── PolicyError                     an eviction policy broke its contract; its request fails
    └── InvariantError                  inconsistent internal bookkeeping: a bug, please report it

A message states the expected value, the actual value, and what to change.
"""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, choices: Sequence[str]) -> list[str]:
    """Return up to three choices with a similar spelling, ignoring case."""
    near = [
        found
        for written in (name, name.lower())
        for found in difflib.get_close_matches(written, choices, n=3)
    ]
    return list(dict.fromkeys(near))[:3]


MAX_LISTED_CHOICES = 40
"""Choices that a message lists if none is similar to the unknown name."""


class QuireError(Exception):
    """Base class of Quire's exceptions."""


class ConfigError(QuireError, ValueError):
    """An option is invalid. No memory was allocated yet."""


class UnknownName(ConfigError):
    """A name is not registered; the message suggests the closest ones, and `more` other ways."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, more: str = "") -> None:
        choices = sorted(known)
        near = nearest(name, choices)
        hint = f"choose from {', '.join(choices)}" if choices else "there is none; leave it out"
        if len(choices) > MAX_LISTED_CHOICES:
            hint = f"none of {len(choices)} known names is similar; see --help-all of the command"
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        super().__init__(f"unknown {kind} {name!r}: {hint}{more and f' ({more})'}")
        self.kind = kind
        self.name = name


class TraceError(ConfigError):
    """A file of recorded requests cannot be read; the message states the line."""


class UnsoundCombination(ConfigError):
    """Two options that are valid alone cannot be combined."""


class UnsupportedModel(ConfigError):
    """The model's attention is not supported with paged KV; the message states why."""


class ModelError(QuireError, ValueError):
    """A model folder cannot be read."""


class RequestError(QuireError, ValueError):
    """One request is invalid or failed; other requests are unaffected.

    Attributes:
        param: name of the invalid field; None if it is not a single field.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(RequestError):
    """A request needs more KV bytes than the whole KV memory, even alone."""


class OutOfPages(QuireError):
    """The arena has too few free pages now. The state is unchanged."""


class HostMemoryFull(QuireError):
    """The CPU memory for swapped or offloaded KV has too few free bytes."""


class SlabFull(QuireError):
    """A dense slab needs more columns than its capacity. The state is unchanged."""


class OffloadError(QuireError):
    """KV outside of the device cannot be loaded or stored. The caller recomputes it."""


class StorageError(OffloadError):
    """A tier cannot load or store bytes now: it is full, read-only or unreachable."""


class TierFull(StorageError):
    """A tier has too little free space for a write; its stored data is unchanged."""


class TierUnreachable(StorageError):
    """A shared store did not respond in time, or sent an invalid response."""


class CorruptData(OffloadError):
    """Data of a tier is damaged. It is deleted and not used."""


class QueueFull(QuireError):
    """Too many requests are waiting. The request was not queued.

    Attributes:
        retry_after_s: estimated seconds until a request is accepted.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(QuireError):
    """The engine's step loop has ended by `close` or an error. All open requests raise it."""


class RankFailed(EngineDead):
    """A process of a tensor-parallel engine failed or stopped responding; the engine has ended."""


class TimeLimitReached(QuireError):
    """A search reached its time limit; what it measured is stored."""


class PolicyError(QuireError):
    """An eviction policy returned a result that breaks its contract."""


class InvariantError(QuireError):
    """Internal bookkeeping is inconsistent."""
