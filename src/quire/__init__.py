"""Quire: an engine for large language models whose centre is the KV cache.

Names are loaded when they are first used, so that `import quire` and `quire --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING

from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM
    from quire.engine.outputs import Answer, Delta, Usage
    from quire.engine.sampling_params import SamplingParams
    from quire.engine.schedule_config import ScheduleConfig
    from quire.kv.config import KVConfig

__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
    "Delta",
    "KVConfig",
    "SamplingParams",
    "ScheduleConfig",
    "Usage",
    "__version__",
]

_HOMES = {
    "LLM": "quire.engine.llm",
    "Answer": "quire.engine.outputs",
    "AsyncLLM": "quire.engine.async_llm",
    "Delta": "quire.engine.outputs",
    "KVConfig": "quire.kv.config",
    "SamplingParams": "quire.engine.sampling_params",
    "ScheduleConfig": "quire.engine.schedule_config",
    "Usage": "quire.engine.outputs",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
