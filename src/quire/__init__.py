"""Quire: an inference engine for large language models, centered on the KV cache.

Public names are imported on first use, so that `import quire` and `quire --help` are fast.
"""

import importlib
from typing import TYPE_CHECKING

from quire.version import __version__

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM
    from quire.api.llm import LLM, EmbeddingOutput
    from quire.config.generation_request import GenerationRequest
    from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
    from quire.config.sampling_params import SamplingParams
    from quire.config.structured_outputs import StructuredOutputs
    from quire.sampling.outputs import OutputDelta, RequestOutput, Usage
    from quire.scheduler.schedule_config import ScheduleConfig

__all__ = [
    "LLM",
    "AsyncLLM",
    "EmbeddingOutput",
    "GenerationRequest",
    "KVConfig",
    "OffloadConfig",
    "OutputDelta",
    "PrefixCacheConfig",
    "RequestOutput",
    "SamplingParams",
    "ScheduleConfig",
    "StructuredOutputs",
    "Usage",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "quire.api.async_llm",
    "EmbeddingOutput": "quire.api.llm",
    "GenerationRequest": "quire.config.generation_request",
    "KVConfig": "quire.config.kv_config",
    "LLM": "quire.api.llm",
    "OffloadConfig": "quire.config.kv_config",
    "OutputDelta": "quire.sampling.outputs",
    "PrefixCacheConfig": "quire.config.kv_config",
    "RequestOutput": "quire.sampling.outputs",
    "SamplingParams": "quire.config.sampling_params",
    "ScheduleConfig": "quire.scheduler.schedule_config",
    "StructuredOutputs": "quire.config.structured_outputs",
    "Usage": "quire.sampling.outputs",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
