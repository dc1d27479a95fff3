"""A replica: an engine with the server's application, which gets requests as calls.

Ray Serve creates one object of `EngineReplica` in each of its processes. The class does not use
Ray.
"""

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from quire.errors import EngineDead
from quire.scale.autoscaling import KV_USED
from quire.scale.http_call import REPLICA_HEADER, HttpCall, HttpPart, respond
from quire.scale.replica_choice import RECEIVED, REPORT
from quire.scale.serve.recipe import ServeRecipe
from quire.serve.embedded import EmbeddedServer
from quire.serve.logs import configure_logs

_LOAD_TIMEOUT_S = 1.0


class EngineReplica:
    """A replica; the methods are called by Ray Serve."""

    def __init__(self, recipe: ServeRecipe, name: str) -> None:
        configure_logs(recipe.server.log_format, recipe.server.log_level)
        llm = recipe.engine.open()
        self._server = EmbeddedServer(
            llm, recipe.server, tenant_keys=recipe.keys, tenants=recipe.tenants
        )
        self._name = name
        self._num_received = 0
        self._reports = itertools.count(1)
        self._server.start()

    async def forward(self, call: HttpCall) -> AsyncGenerator[HttpPart, None]:
        """Yield the parts of a response; another replica can run it if `EngineDead` comes first."""
        self._num_received += 1
        has_output = False
        async with aclosing(respond(self._server.app, call)) as parts:
            async for part in parts:
                if not has_output and self._server.has_died:
                    raise EngineDead("the engine of this replica has stopped by an error")
                has_output = True
                yield self._named(part)

    async def answer(self, call: HttpCall) -> tuple[str, HttpPart]:
        """Run a request and return the name of the replica and the whole response."""
        parts = [part async for part in respond(self._server.app, call)]
        body = b"".join(part.body for part in parts)
        return self._name, replace(parts[0], body=body, is_last=True)

    def _named(self, part: HttpPart) -> HttpPart:
        """A part whose headers, if it has any, contain the name of the replica."""
        if part.status is None:
            return part
        return replace(part, headers=(*part.headers, (REPLICA_HEADER, self._name.encode())))

    async def check_health(self) -> None:
        """Tell Ray to replace the replica if its engine has stopped."""
        if self._server.has_died:
            raise EngineDead("the engine has stopped by an error; see the log of the replica")

    async def record_routing_stats(self) -> dict[str, Any]:
        received = self._num_received  # before the load, which then includes these requests
        load = await self._server.load(_LOAD_TIMEOUT_S)
        return {**asdict(load), RECEIVED: received, REPORT: next(self._reports)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        load = await self._server.load(_LOAD_TIMEOUT_S)
        return {KV_USED: load.active_kv_bytes / max(1, load.kv_capacity_bytes)}

    async def close(self) -> None:
        await self._server.stop()
