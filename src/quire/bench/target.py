"""The measured server: its model, and one request."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from quire.bench.config import BenchServeConfig
from quire.bench.connection import Connections, Reply, ServerError
from quire.bench.prompts import BenchRequest
from quire.bench.stream import Outcome, error_text, read_stream
from quire.errors import ConfigError

_OK = 200


class Target:
    """A server with an OpenAI-compatible API.

    Args:
        config: options of the benchmark.
        api_key: key of the server; None: no key is sent.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: BenchServeConfig,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config, self._clock = config, clock
        self._connections = Connections(config.url, clock)
        self._prefix = config.url.path.rstrip("/")
        self._headers = {"accept": "*/*", "content-type": "application/json"} | config.headers()
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def models(self) -> list[dict[str, Any]]:
        """The models of the server, with at least `id`.

        Raises:
            ConfigError: the server cannot be reached, refuses the key, or has no model.
        """
        where = f"{self._config.url.geturl().rstrip('/')}/v1/models"
        try:
            reply = await self._exchange("GET", "/v1/models")
        except ServerError as error:
            raise ConfigError(
                f"{where}: {error}; start the server, or name it with --base-url or --host and "
                "--port"
            ) from error
        body = _value(reply.body)
        found = body.get("data") if isinstance(body, dict) else None
        if reply.status != _OK or not found:
            raise ConfigError(f"{where} has status {reply.status}: {error_text(body)}")
        return list(found)

    async def send(self, request: BenchRequest, model: str) -> Outcome:
        """Send a request and read its response; failures are part of the outcome."""
        body = json.dumps(self.body(request, model)).encode()
        outcome = Outcome(start_s=self._clock(), prompt_tokens=request.prompt.tokens)
        try:
            async with asyncio.timeout(self._config.request_timeout):
                reply = await self._exchange("POST", self._config.path, body)
            if reply.status == _OK:
                read_stream(reply.segments, outcome)
            else:
                outcome.error = f"status {reply.status}: {error_text(_value(reply.body))}"
        except ServerError as error:
            outcome.error = str(error)
        except TimeoutError:
            outcome.error = f"no complete response within {self._config.request_timeout:g} s"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            outcome.error = f"the response is not that of OpenAI's API: {error!r}"
        outcome.end_s = outcome.end_s or self._clock()
        return outcome

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """Body of a request."""
        config, content = self._config, request.prompt.content
        body: dict[str, Any] = {"model": model}
        if config.is_chat:
            is_text = isinstance(content, str)
            body["messages"] = [{"role": "user", "content": content}] if is_text else content
        else:
            body["prompt"] = content
        limit = "max_completion_tokens" if config.is_chat else "max_tokens"
        body |= {limit: request.output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if config.ignore_eos:
            body["ignore_eos"] = True
        chosen = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        body |= {name: value for name, value in chosen.items() if value is not None}
        return body | config.extra_fields()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    async def _exchange(self, method: str, path: str, body: bytes = b"") -> Reply:
        async with self._connections.connection() as connection:
            return await connection.exchange(method, self._prefix + path, self._headers, body)


def _value(data: bytes) -> object:
    """The JSON value of a body, else its text."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")
