"""Shutdown of the server: on a signal, or when the engine has stopped.

On SIGTERM or SIGINT the server first refuses new requests and finishes the open ones, then closes
the port. If the engine's loop ends by an error, the server closes and the process ends with an
error, so that its supervisor restarts it.
"""

import asyncio
import logging
import math
import socket
from types import FrameType

import uvicorn

from quire.serve.service import Service

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LEAST_CLOSING_S = 1
_RED_S = 2.0
"""Seconds between the end of the engine and the end of the process, in which `/health` returns 503
and open requests get their errors."""


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which accepts connections until all open requests have ended.

    Meanwhile `/health` returns 200 and `/ready` 503, so that a load balancer sends requests to
    other servers. A second signal ends the wait and cancels the open requests.

    Args:
        config: its `timeout_graceful_shutdown` is the limit in seconds for both steps together.
        service: the service to drain.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._num_signals = 0
        self._red_until_s: float | None = None

    @property
    def engine_died(self) -> bool:
        """Whether the engine's loop ended by an error."""
        return self._red_until_s is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests from the first signal on; a second one ends the wait."""
        self._service.drain()
        self._num_signals += 1
        super().handle_exit(sig, frame)
        if self._num_signals > 1:
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Check the engine; called ten times a second.

        Returns:
            Whether the server shuts down.
        """
        should_exit = await super().on_tick(counter)
        return should_exit or self._has_been_red()

    def _has_been_red(self) -> bool:
        """Whether the engine stopped by an error some time ago."""
        if not self._service.has_died:
            return False
        now_s = asyncio.get_running_loop().time()
        if self._red_until_s is None:
            self._red_until_s = now_s + _RED_S
            logger.critical("the engine has stopped: the server shuts down with an error")
        return now_s >= self._red_until_s

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
