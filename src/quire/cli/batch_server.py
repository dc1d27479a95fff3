"""`quire batch` on a server: sends input lines without a record, several at once.

The server checks the options of a line, so that lines for any OpenAI-compatible server are valid.
"""

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
import typer

from quire.batch.lines import BatchError, BatchTask, LineFormat, LineHead, LineKind, json_object
from quire.batch.prompts import no_prompt, shown
from quire.batch.records import BatchTally, Record, error_record
from quire.cli.batch_files import GROUP_S, BatchOutput, RecordGroups
from quire.cli.progress import CountProgress
from quire.cli.settings import Settings
from quire.errors import ConfigError

KEY_VARIABLE = "OPENAI_API_KEY"
_OF_ENGINE = ("model", "kv", "schedule")  # sections of options
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
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_KINDS: Mapping[str, LineKind] = {CHAT: "chat"}
_PATH = re.compile(r"/v1/[!-~]{1,2000}")  # printable ASCII without spaces
OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLine:
    """The request of one line."""

    head: LineHead
    path: str  # such as /v1/completions
    body: Mapping[str, Any]

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


def server_line(
    raw: bytes, number: int, form: LineFormat, model: str, defaults: Mapping[str, Any]
) -> ServerLine:
    """The request of a line."""
    value = json_object(raw, number)
    line = (
        _openai(value, number) if "body" in value or "url" in value else _plain(value, number, form)
    )
    if line.body.get("stream"):
        raise BatchError("stream=True is not supported in a batch: leave it out", line.head)
    own = {"model": model} | (dict(defaults) if line.path in (COMPLETIONS, CHAT) else {})
    if "max_completion_tokens" in line.body:
        own.pop("max_tokens", None)
    return ServerLine(head=line.head, path=line.path, body=own | dict(line.body))


def _openai(value: Mapping[str, Any], number: int) -> ServerLine:
    url, name, body = value.get("url"), value.get("custom_id"), value.get("body")
    kind = _KINDS.get(url, "completions") if isinstance(url, str) else "completions"
    head = LineHead(number=number, kind=kind, name=name if isinstance(name, str) else None)
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise BatchError(
            f"expected url as a path of ASCII characters such as {COMPLETIONS}, got {shown(url)}",
            head,
        )
    if value.get("method", "POST") != "POST":
        raise BatchError(f"expected method POST, got {shown(value['method'])}", head)
    if not isinstance(name, str) or not name:
        raise BatchError(f"expected a string as custom_id, got {shown(name)}", head)
    if not isinstance(body, dict):
        raise BatchError(f"expected a JSON object as body, got {shown(body)}", head)
    return ServerLine(head=head, path=url, body=body)


def _plain(value: Mapping[str, Any], number: int, form: LineFormat) -> ServerLine:
    name = value.get("id")
    head = LineHead(number=number, name=None if name is None else str(name))
    if form.prompt_key != "prompt":
        value = {"prompt": value.get(form.prompt_key)}
    if ("prompt" in value) == ("messages" in value):
        raise BatchError(no_prompt(value), head)
    body = {key: given for key, given in value.items() if key != "id"}
    if "messages" in body:
        return ServerLine(head=head, path=CHAT, body=body)
    if not body["prompt"]:
        raise BatchError(f"expected a prompt, got {shown(body['prompt'])}", head)
    if isinstance(body["prompt"], str):
        body["prompt"] = form.prefix + body["prompt"]
    return ServerLine(head=head, path=COMPLETIONS, body=body)


# ---- records -------------------------------------------------------------------------------------


def response_record(
    line: ServerLine, status: int, content: bytes, request_id: str | None, *, with_prompt: bool
) -> Record:
    """The record of a response."""
    body = _json(content)
    if not isinstance(body, dict):
        body = {"error": {"message": str(body)[:500], "type": "invalid_response"}}
        status = status if status != OK else 502
    message = None if status == OK else _message(body)
    if line.head.kind != "plain":
        error = None if message is None else {"code": f"status_{status}", "message": message}
        return {
            "id": f"batch_req_{line.head.number}",
            "line": line.head.number,
            "custom_id": line.head.name,
            "response": {
                "status_code": status,
                "request_id": request_id or f"req_{line.head.number}",
                "body": body,
            },
            "error": error,
        }
    if message is not None:
        return error_record(line.head, message)
    return _plain_record(line, body, with_prompt=with_prompt)


def _plain_record(line: ServerLine, body: Mapping[str, Any], *, with_prompt: bool) -> Record:
    choices = [
        {"text": _text(choice), "finish_reason": choice.get("finish_reason")}
        for choice in body.get("choices") or ()
    ]
    if not choices:
        return error_record(line.head, "the response has no choices")
    name = line.head.name if line.head.name is not None else f"line-{line.head.number}"
    requested = {key: line.body[key] for key in ("prompt", "messages") if key in line.body}
    return {
        "id": name,
        "line": line.head.number,
        **(requested if with_prompt else {}),
        **choices[0],
        **({"choices": choices} if len(choices) > 1 else {}),
        "usage": body.get("usage"),
        "error": None,
    }


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or {}).get("content") or "")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServer:
    """The server of a batch."""

    base_url: str  # with or without /v1
    api_key: str | None = None
    max_concurrency: int = 64  # requests in flight
    max_retries: int = 8  # repetitions of a request that failed for the moment
    timeout_s: float = 3600.0  # of a response

    @property
    def url(self) -> str:
        """URL without /v1, which the paths of lines contain."""
        return self.base_url.rstrip("/").removesuffix("/v1")


class ServerBatch:
    """Sends the lines of an input file that have no record yet.

    A response with status 408, 429, 500, 502, 503 or 504 is repeated after its `Retry-After`, else
    after a time that doubles. If the server cannot be reached any more, the run ends and can be
    resumed.
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
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
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
        self.tally.add(record)
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


def server_of(
    settings: Settings, base_url: str, api_key: str | None, max_concurrency: int, max_retries: int
) -> BatchServer:
    """The server of a batch."""
    engine = sorted(name for name in settings.given if name.partition("_")[0] in _OF_ENGINE)
    if engine:
        flag = engine[0].partition("_")[2].replace("_", "-")
        raise ConfigError(
            f"{flag} is an option of the engine and has no effect with --base-url: set it in the "
            "server, and leave it out"
        )
    if not _is_url(base_url):
        raise ConfigError(f"expected --base-url as http://HOST:PORT, got {base_url!r}")
    key = api_key or os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "expected a key of printable ASCII characters, got others: correct --api-key or the "
            f"environment variable {KEY_VARIABLE}"
        )
    return BatchServer(
        base_url=base_url,
        api_key=key,
        max_concurrency=max_concurrency,
        max_retries=max_retries,
    )


def _is_url(text: str) -> bool:
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # not a port
        return False


def run_on_server(
    settings: Settings, server: BatchServer, task: BatchTask, output: BatchOutput, left: int
) -> tuple[BatchTally, float]:
    """Send the remaining lines to a server; return the tally and the seconds."""
    typed = {name.removeprefix("sampling_") for name in settings.given}
    chosen = {name: value for name, value in asdict(task.sampling).items() if name in typed}
    defaults = {"max_tokens": task.sampling.max_tokens} | chosen
    start_s = time.monotonic()
    with CountProgress("batch", left) as progress:
        run = ServerBatch(server, task, output, settings.model, defaults, progress.count)
        try:
            run.run()
        except KeyboardInterrupt:
            typer.echo("interrupted: run the same command to resume", err=True)
            raise
    return run.tally, time.monotonic() - start_s
