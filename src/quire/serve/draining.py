"""Shuts the server down in two steps: new requests are refused first, then the port is closed."""

import asyncio
import math
import socket
from types import FrameType

import uvicorn

from quire.serve.service import Service

_POLL_S = 0.1
_LEAST_CLOSING_S = 1


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which accepts connections until open requests have ended.

    While they go on, `/health` answers 200 and `/ready` 503, so that a load balancer sends its
    requests elsewhere. A second SIGINT ends the wait.

    Args:
        config: its `timeout_graceful_shutdown` is the time in seconds for both steps together.
        service: told to drain.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests from the signal on."""
        self._service.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, then close the port and all connections."""
        self._service.drain()
        await self._wait_for_requests()
        await super().shutdown(sockets)

    async def _wait_for_requests(self) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (self.config.timeout_graceful_shutdown or 0)
        while self.server_state.tasks and not self.force_exit and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        left_s = math.ceil(end_s - loop.time())
        self.config.timeout_graceful_shutdown = max(_LEAST_CLOSING_S, left_s)
