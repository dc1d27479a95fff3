"""The loop of `quire batch` with a server: sends input lines without a record, several at once."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from quire.batch.lines import BatchError, BatchTask
from quire.batch.records import BatchTally, Record, error_record
from quire.cli.batch_groups import GROUP_S, RecordGroups
from quire.cli.batch_output import BatchOutput
from quire.cli.batch_server_lines import (
    ServerLine,
    finish_reason,
    response_record,
    server_line,
    tokens,
)
from quire.errors import ConfigError

_LONGEST_WAIT_S = 60.0
_FIRST_WAIT_S = 0.5
_RETRIED = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_JSON = {"content-type": "application/json"}
_REFUSED_KEYS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServer:
    """The server of a batch.

    Attributes:
        base_url: URL with or without /v1.
        api_key: key of the server; None: no key is sent.
        max_concurrency: most requests in flight.
        max_retries: most repetitions of a request that failed for the moment.
        timeout_s: time limit of a response in seconds.
    """

    base_url: str
    api_key: str | None = None
    max_concurrency: int = 64
    max_retries: int = 8
    timeout_s: float = 3600.0

    @property
    def url(self) -> str:
        """URL without /v1, which the paths of lines contain."""
        return self.base_url.rstrip("/").removesuffix("/v1")


class ServerBatch:
    """Sends the lines of an input file that have no record yet.

    A response with status 408, 429, 500, 502, 503 or 504 is repeated after its `Retry-After`, else
    after a time that doubles. If the server cannot be reached any more, the run ends and can be
    resumed.

    Args:
        server: the server.
        task: the batch.
        output: output file, with the numbers of completed lines.
        model: model of lines that name none.
        defaults: options of lines that do not set them.
        on_record: called after every record with the number of records.
    """

    def __init__(
        self,
        server: BatchServer,
        task: BatchTask,
        output: BatchOutput,
        model: str,
        defaults: Mapping[str, Any],
        on_record: Callable[[int], None],
    ) -> None:
        self._server, self._task, self._output = server, task, output
        self._model, self._defaults, self._on_record = model, defaults, on_record
        self._groups = RecordGroups(output)
        self.tally = BatchTally()

    def run(self) -> BatchTally:
        """Send all remaining lines and write their records to disk.

        Raises:
            ConfigError: the server cannot be reached or refuses the key, or the output can no
                longer be written.
        """
        try:
            asyncio.run(self._run())
        finally:
            self._output.flush()
        return self.tally

    async def _run(self) -> None:
        key = self._server.api_key
        most = self._server.max_concurrency
        async with httpx.AsyncClient(
            base_url=self._server.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._server.timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
        ) as client:
            lines = self._lines()
            tasks = [asyncio.create_task(self._send_all(client, lines)) for _ in range(most)]
            flusher = asyncio.create_task(self._flush_regularly())
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in (*tasks, flusher):
                    task.cancel()

    def _lines(self) -> Iterator[ServerLine]:
        """Yield the requests of lines without a record; invalid lines get their records."""
        task = self._task
        with task.source.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.strip() or number in self._output.completed:
                    continue
                try:
                    yield server_line(raw, number, task.form, self._model, self._defaults)
                except BatchError as error:
                    self._put(error_record(error.head, str(error)))

    async def _send_all(self, client: httpx.AsyncClient, lines: Iterator[ServerLine]) -> None:
        for line in lines:
            self._put(await self._record(client, line))

    async def _record(self, client: httpx.AsyncClient, line: ServerLine) -> Record:
        try:
            response = await self._response(client, line)
        except (httpx.RequestError, httpx.InvalidURL) as error:  # of this line alone
            return error_record(line.head, f"the request failed: {error}")
        if response.status_code in _REFUSED_KEYS:
            raise ConfigError(
                f"{self._server.url} refuses the key (status {response.status_code}): set --api-key"
            )
        return response_record(
            line,
            response.status_code,
            response.content,
            response.headers.get("x-request-id"),
            with_prompt=self._task.with_prompt,
        )

    async def _response(self, client: httpx.AsyncClient, line: ServerLine) -> httpx.Response:
        """Send a request until its response is final.

        Raises:
            ConfigError: the server cannot be reached.
            RequestError, InvalidURL: of httpx: a response that cannot be read, or an invalid URL.
        """
        for retry in range(self._server.max_retries + 1):
            wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**retry) * random.uniform(0.75, 1.25)
            try:
                response = await client.post(line.path, content=line.content, headers=_JSON)
            except httpx.TransportError as error:
                last = f"{self._server.url} cannot be reached: {str(error) or type(error).__name__}"
            else:
                if response.status_code not in _RETRIED or retry == self._server.max_retries:
                    return response
                last = f"{self._server.url} has status {response.status_code}"
                wait_s = _retry_after_s(response) or wait_s
            if retry < self._server.max_retries:
                await asyncio.sleep(wait_s)
        raise ConfigError(f"{last}; run the same command again to resume")

    def _put(self, record: Record) -> None:
        self.tally.count(record, finish_reason(record))
        self.tally.count_tokens(*tokens(record))
        self._groups.put(record)
        self._on_record(self.tally.completed)

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(GROUP_S)
            self._groups.flush_if_due()


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of the header Retry-After, at most a minute; None without a number."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:  # missing, or a date
        return None
    return min(_LONGEST_WAIT_S, seconds) if seconds > 0 else None
