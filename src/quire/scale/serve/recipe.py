"""What a process needs to create a replica or a gateway: values that can be sent to it."""

from dataclasses import dataclass, field

from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe
from quire.scale.routing.policies import RouterConfig
from quire.serve.config import ServerConfig
from quire.serve.tenant_keys import TenantFile, TenantKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecipe:
    """A served model."""

    engine: EngineRecipe
    server: ServerConfig = field(default_factory=ServerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    routing: RouterConfig = field(default_factory=RouterConfig)
    keys: TenantKeys = field(default_factory=TenantKeys)  # digests of the API keys
    tenants: TenantFile = field(default_factory=TenantFile)
