"""The engines: environment, worker and options of each."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.config import Eviction
from quire.errors import ConfigError, UnknownName

QUIRE, QUIRE_EVICT = "quire", "quire_evict"
STATIC, CONTINUOUS, VLLM, LLAMACPP = "hf_static", "hf_cb", "vllm", "llamacpp"
EVICTION_RULE = (
    "keydiff:cap=160,sinks=4,recent=32,every=16,granularity=chunk,chunk_tokens=4,when=decode"
)
"""Quire's rule beside engines with eviction."""
OPENVINO, OPENVINO_EVICT, OPENVINO_KVCRUSH = "openvino", "openvino_evict", "openvino_kvcrush"
QUIRE_ENVIRONMENT, TRANSFORMERS = "quire", "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine with its options.

    Attributes:
        name: name in options, tables and claims.
        environment: name of its environment; engines with equal environment share it.
        worker: module of `benchmarks.peers.workers`.
        options: options of its worker.
        evicts: whether it evicts KV; such engines run only in a fixed KV memory.
        prepares: whether its worker converts the model first.
        preload: libraries to preload if they are found, in its environment or in the system.
    """

    name: str
    environment: str
    worker: str
    options: Mapping[str, Any] = field(default_factory=dict)
    evicts: bool = False
    prepares: bool = False
    preload: tuple[str, ...] = ()

    @property
    def is_quire(self) -> bool:
        """Whether this is Quire with some options."""
        return self.environment == QUIRE_ENVIRONMENT


def quire_engine(text: str) -> Engine:
    """Quire from a text NAME=FLAGS, such as `int8=--weight-codec int8`.

    Raises:
        ConfigError: not such a text.
    """
    name, equals, flags = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(
            f"expected Quire's options as NAME=FLAGS, such as 'quire_int8=--weight-codec int8', "
            f"got {text!r}"
        )
    words = shlex.split(flags)
    evicts = any(word.partition("=")[0] == "--evict" for word in words)
    return Engine(
        name=name,
        environment=QUIRE_ENVIRONMENT,
        worker="quire_engine",
        options={"flags": words},
        evicts=evicts,
    )


def default_quire() -> tuple[Engine, ...]:
    """Quire with default options, and with eviction.

    As in OpenVINO, prompts are computed as a whole, and tokens are evicted afterwards. The rule
    retains fewer tokens than OpenVINO's (144 to 160): see docs/log.md.
    """
    return quire_engine(f"{QUIRE}="), quire_engine(f"{QUIRE_EVICT}=--evict {EVICTION_RULE}")


def peer_engines(eviction: Eviction) -> tuple[Engine, ...]:
    """All other engines."""
    cap = {"start": eviction.start, "recent": eviction.recent, "max": eviction.most}
    crush = cap | {"kvcrush": eviction.kvcrush}
    return (
        Engine(name=STATIC, environment=TRANSFORMERS, worker="transformers_static"),
        Engine(name=CONTINUOUS, environment=TRANSFORMERS, worker="transformers_continuous"),
        Engine(
            name=VLLM,
            environment="vllm",
            worker="vllm_cpu",
            preload=("libiomp5.so", "libtcmalloc_minimal.so.4"),
        ),
        _openvino(OPENVINO, {}),
        _openvino(OPENVINO_EVICT, cap),
        _openvino(OPENVINO_KVCRUSH, crush),
        Engine(name=LLAMACPP, environment=LLAMACPP, worker="llamacpp", prepares=True),
    )


def _openvino(name: str, options: Mapping[str, Any]) -> Engine:
    return Engine(
        name=name,
        environment="openvino",
        worker="openvino_genai",
        options=options,
        evicts=bool(options),
        prepares=True,
    )


def chosen_engines(
    names: Iterable[str], quire: Iterable[Engine], eviction: Eviction
) -> tuple[Engine, ...]:
    """Quire's engines and the named others.

    Args:
        names: names of the other engines; empty: all.
        quire: Quire with different options, the one of the claims first.
        eviction: cap of the evicting engines.

    Raises:
        UnknownName: no engine has this name.
        ConfigError: two engines with one name.
    """
    known = {engine.name: engine for engine in peer_engines(eviction)}
    wanted = tuple(names) or tuple(known)
    for name in wanted:
        if name not in known:
            raise UnknownName("engine", name, known)
    found = (*quire, *(known[name] for name in known if name in wanted))
    if len({engine.name for engine in found}) != len(found):
        raise ConfigError(
            f"expected engines with different names, got {', '.join(e.name for e in found)}"
        )
    return found


def python_of(engine: Engine, environments: Path) -> Path | None:
    """Python of the engine's environment; None if it is not built.

    Engines of Transformers run in Quire's own environment if theirs is not built.
    """
    if engine.is_quire:
        return Path(sys.executable)
    found = environments / engine.environment / "bin" / "python"
    if found.exists():
        return found
    return Path(sys.executable) if engine.environment == TRANSFORMERS else None


def preloaded(engine: Engine, environments: Path) -> list[str]:
    """Paths of the engine's libraries to preload, of those that are found."""
    folders = [environments / engine.environment / "lib", *map(Path, _SYSTEM_LIBRARIES)]
    paths = []
    for library in engine.preload:
        found = [folder / library for folder in folders if (folder / library).exists()]
        paths += [str(found[0])] if found else []
    return paths


_SYSTEM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
