"""Options of the HTTP server."""

import math
from dataclasses import dataclass
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import Size, check_options, option
from quire.layout.sizes import parse_size

UnknownFields = Literal["refuse", "warn"]
MAX_OUTPUTS = 2048
"""Limit of the outputs of one HTTP request: its prompts times the sequences of each prompt."""

LARGEST_PORT = 65_535
MAX_TOKENIZER_THREADS = 64


@no_type_check  # run-time type checks in tests must not precede ConfigError
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    host: str = option("127.0.0.1", help="address to bind", common=True)
    port: int = option(8000, help="port to bind; 0 selects a free port", common=True)
    served_model_name: str | None = option(
        None, help="model name in requests; unset: name of the model", common=True
    )
    tenant_keys: str | None = option(
        None,
        help="TOML file with the API keys of each tenant; with keys, every path except /health "
        "and /ready needs one",
        common=True,
    )
    unknown_fields: UnknownFields = option(
        "warn",
        help="response to unknown request fields: refuse (status 400) or warn (a log line and the "
        "response header X-Ignored-Fields)",
    )
    max_body: Size = option(
        "8MiB",
        help="maximum size of a request body (bytes or a size such as 8MiB); larger bodies get "
        "status 413",
        unit="bytes",
        parse=parse_size,
    )
    header_timeout: float = option(
        20.0,
        help="timeout in seconds for request headers, and for pauses within a request body; then "
        "the connection is closed",
        unit="s",
    )
    tokenizer_threads: int = option(
        2,
        help="tokenizer threads; with more than one, a tenant can use all except one",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.host:
            raise ConfigError(
                "expected a host address, got an empty string: use 0.0.0.0 for all addresses of "
                "this machine, or leave it out"
            )
        if not 0 <= self.port <= LARGEST_PORT:
            raise ConfigError(f"expected a port from 0 to {LARGEST_PORT}, got {self.port}")
        if self.served_model_name == "":
            raise ConfigError(
                "expected a served-model-name that is not empty; leave it out for the model's name"
            )
        if not self.max_body:
            raise ConfigError("expected a max-body of at least 1 byte, got 0")
        if not 0 < self.header_timeout < math.inf:
            raise ConfigError(f"expected header-timeout > 0 seconds, got {self.header_timeout}")
        if not 1 <= self.tokenizer_threads <= MAX_TOKENIZER_THREADS:
            raise ConfigError(
                f"expected 1 to {MAX_TOKENIZER_THREADS} tokenizer-threads, got "
                f"{self.tokenizer_threads}"
            )
