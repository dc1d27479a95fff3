"""The server without a socket, for a process that receives HTTP requests in another way.

A replica of Ray Serve, for example, gets each request as a call. It runs the same application as
`quire serve`: the same paths, streams, headers and errors.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from fastapi import FastAPI

from quire.api.llm import LLM
from quire.engine.core import Engine
from quire.errors import EngineDead
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.errors import (
    ReplicaLost,
    Unauthorized,
    error_events,
    error_response,
    refusal_response,
)
from quire.serve.service import Service
from quire.serve.tenant_keys import TenantFile, TenantKeys

__all__ = [
    "EmbeddedServer",
    "EngineLoad",
    "ReplicaLost",
    "Unauthorized",
    "error_events",
    "error_response",
    "read_load",
    "refusal_response",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine between two steps."""

    active_kv_bytes: int = 0  # without cached prefixes that no request uses
    kv_capacity_bytes: int = 0
    queued_prompt_tokens: int = 0  # not computed yet, of running and waiting requests
    running_requests: int = 0  # requests with KV
    queued_requests: int = 0


class EmbeddedServer:
    """An engine with the server's application."""

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        *,
        tenant_keys: TenantKeys | None = None,
        tenants: TenantFile | None = None,
    ) -> None:
        self.app: FastAPI = create_app(llm, config, tenant_keys=tenant_keys, tenants=tenants)
        self._service: Service = self.app.state.service
        self._load = EngineLoad()

    def start(self) -> None:
        self._service.start()

    async def stop(self) -> None:
        await self._service.stop()

    @property
    def has_died(self) -> bool:
        return self._service.has_died

    async def load(self, timeout_s: float) -> EngineLoad:
        """Read the load between two steps; during a long step return the previous load."""
        with suppress(TimeoutError, EngineDead):
            self._load = await asyncio.wait_for(self._service.inspect(read_load), timeout_s)
        return self._load


def read_load(engine: Engine) -> EngineLoad:
    """Read the load of an engine between two steps, in its thread."""
    memory, scheduler = engine.pool.kv.memory, engine.scheduler
    running, waiting = scheduler.running, list(scheduler.waiting.ordered())
    return EngineLoad(
        active_kv_bytes=memory.used_bytes - memory.listeners.idle_bytes(),
        kv_capacity_bytes=memory.total_bytes,
        queued_prompt_tokens=sum(
            max(0, len(request.prompt_token_ids) - request.progress.num_computed)
            for request in (*running, *waiting)
        ),
        running_requests=len(running),
        queued_requests=len(waiting),
    )
