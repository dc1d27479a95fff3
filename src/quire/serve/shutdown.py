"""Shutdown of the server: on a signal, or when the engine has stopped.

On SIGTERM or SIGINT the server first refuses new requests and finishes the open ones. It ends those
that remain after a limit with an error, then closes the port. If the engine's loop ends by an
error, the server closes and the process ends with an error, so that its supervisor restarts it.
Otherwise it ends with status 0.
"""

import asyncio
import logging
import signal
import socket
from contextlib import suppress
from types import FrameType

import uvicorn

from quire.errors import EngineDead
from quire.serve.service import Service

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_CLOSING_S = 1
"""Seconds for clients to receive the errors of requests that the shutdown ends."""
_RED_S = 2.0
"""Seconds between the end of the engine and the end of the process, in which `/health` returns 503
and open requests get their errors."""


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which accepts connections until all open requests have ended.

    Meanwhile `/health` returns 200 and `/ready` 503, so that a load balancer sends requests to
    other servers. At the limit, or on a second signal, open requests end with an error. A third
    signal ends the process at once.

    Args:
        config: its `timeout_graceful_shutdown` is the limit in seconds for open requests.
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
        """Refuse new requests; the second signal ends open ones, the third one the process."""
        self._service.drain()
        self._num_signals += 1
        if self._num_signals == 1:
            # not uvicorn's: it would end the process by the signal after the requests have ended
            self.should_exit = True
        elif self._num_signals > 2:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

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
        """Wait for open requests, end those that remain, then close the port and connections."""
        self._service.drain()
        timeout_s = self.config.timeout_graceful_shutdown or 0
        if self._num_open:
            await self._finish_requests(timeout_s)
        else:
            logger.info("shutting down")
        self.config.timeout_graceful_shutdown = _CLOSING_S
        await super().shutdown(sockets)

    async def _finish_requests(self, timeout_s: float) -> None:
        logger.info(
            "shutting down: %d open requests may continue for %d s", self._num_open, timeout_s
        )
        await self._wait_for_requests(timeout_s, until_signal=True)
        number = self._num_open
        if number:
            await self._end_requests()
            logger.info("shutting down: %d open requests were ended", number)
        else:
            logger.info("shutting down: all open requests have finished")

    @property
    def _num_open(self) -> int:
        return len(self.server_state.tasks)

    async def _wait_for_requests(self, limit_s: float, *, until_signal: bool = False) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self._num_open and loop.time() < end_s:
            if until_signal and self._num_signals > 1:
                return
            await asyncio.sleep(_POLL_S)

    async def _end_requests(self) -> None:
        """End open requests with an error; close the connections of clients that do not read it."""
        with suppress(EngineDead, TimeoutError):
            await asyncio.wait_for(self._service.end_requests(), _CLOSING_S)
        await self._wait_for_requests(_CLOSING_S)
        if self._num_open:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self._wait_for_requests(_CLOSING_S)
