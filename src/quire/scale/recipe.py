"""What a process needs to create an engine or a server: values that can be sent to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.scale.config import RayConfig
from quire.scale.routing.registry import RouterConfig
from quire.serve.config import ServerConfig
from quire.serve.tenant_file import TenantFile
from quire.serve.tenant_keys import TenantKeys

if TYPE_CHECKING:
    from quire.api.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """A model with the options of its engine.

    Attributes:
        model: "quire-tiny", a folder that every machine has, or a hub name.
        options: keyword arguments of `quire.LLM`.
        threads: CPU threads of PyTorch; 0: PyTorch's default.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0

    def open(self) -> "LLM":
        """Load the model and allocate its KV memory.

        Raises:
            ConfigError: invalid or conflicting options.
            ModelError: the model cannot be read.
        """
        import torch

        from quire.api.llm import LLM

        if self.threads:
            torch.set_num_threads(self.threads)
        return LLM(self.model, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecipe:
    """A served model.

    Attributes:
        engine: model and engine of each replica.
        server: options of the HTTP server.
        ray: options of the replicas.
        routing: options of request routing.
        keys: digests of the API keys.
        tenants: rate limits and eviction rules of tenants.
    """

    engine: EngineRecipe
    server: ServerConfig = field(default_factory=ServerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    routing: RouterConfig = field(default_factory=RouterConfig)
    keys: TenantKeys = field(default_factory=TenantKeys)
    tenants: TenantFile = field(default_factory=TenantFile)
