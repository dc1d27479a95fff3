"""What a process needs to create an engine: values that can be sent to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.api.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """A model with the options of its engine."""

    model: str  # "quire-tiny", a folder that every machine has, or a hub name
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of `quire.LLM`
    threads: int = 0  # 0: PyTorch's default

    def open(self) -> "LLM":
        import torch

        from quire.api.llm import LLM

        if self.threads:
            torch.set_num_threads(self.threads)
        return LLM(self.model, **self.options)
