"""Options of the HTTP server."""

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import Size, check_options, option
from quire.layout.sizes import parse_size
from quire.layout.values import find_fault
from quire.serve.logs import LogFormat, LogLevel

MetricNames = Literal["quire", "vllm", "both"]
ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral"]
MAX_OUTPUTS = 2048
"""Limit of the outputs of one HTTP request: its prompts times the sequences of each prompt."""

LARGEST_PORT = 65_535
KEY_VARIABLE = "QUIRE_API_KEY"
"""Environment variable with an API key of the default tenant."""

METRICS_KEY_VARIABLE = "QUIRE_METRICS_KEY"
"""Environment variable with the API key of /metrics."""

MIN_KEY_CHARACTERS = 8

LIMITS, TLS, CORS = "Limits of the server", "TLS", "Web pages (CORS)"
OBSERVATION = "Metrics and traces"
_LEAST = (
    *("requests_per_minute", "tokens_per_minute"),
    *("max_num_queued_reqs", "max_num_queued_tokens"),
)
MAX_TOKENIZER_THREADS = 64
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._-]+)(:\d+)?")


@no_type_check  # run-time type checks in tests must not precede ConfigError
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server."""

    host: str = option("127.0.0.1", help="address to bind", common=True)
    port: int = option(8000, help="port to bind; 0 selects a free port", common=True)
    served_model_name: str | None = option(
        None, help="model name in requests; unset: name of the model", common=True
    )
    tenant_keys: str | None = option(
        None,
        help="TOML file with the API keys of each tenant; with keys, every path except /, "
        "/health, /ready, /ping, /docs and the files of the dashboard needs one",
        common=True,
    )
    dashboard: bool | None = option(
        None,
        help="serve the dashboard at /dashboard, and texts of tokens under /v1/kv; unset: only if "
        "the server listens at a loopback address or tenants have keys",
        common=True,
    )
    api_key: tuple[str, ...] = option(
        (),
        help="API key of the default tenant; other users of the machine can see it in "
        f"the list of processes, unlike the environment variable {KEY_VARIABLE} and --tenant-keys",
        common=True,
    )
    requests_per_minute: int | None = option(
        None,
        help="prompts per minute of each tenant without its own limit in --tenant-keys; more get "
        "status 429; unset: no limit",
        group=LIMITS,
    )
    tokens_per_minute: int | None = option(
        None,
        help="prompt and output tokens per minute of each tenant without its own limit in "
        "--tenant-keys; unset: no limit",
        group=LIMITS,
    )
    max_num_queued_reqs: int | None = option(
        None,
        help="limit of waiting requests; while it is reached, new requests get status 503; unset: "
        "no limit",
        group=LIMITS,
    )
    max_num_queued_tokens: int | None = option(
        None,
        help="limit of the prompt tokens of waiting requests; unset: no limit",
        unit="tokens",
        group=LIMITS,
    )
    shutdown_timeout: float = option(
        60.0,
        help="time in seconds for open requests after SIGTERM or SIGINT; a second signal ends them",
        unit="s",
    )
    stream_interval: int = option(
        1,
        help="tokens in each event of a stream after the first one; higher values raise the "
        "throughput of small models with many streams",
        unit="tokens",
    )
    sse_keep_alive_interval: float = option(
        15.0,
        help="interval in seconds of comments in a stream without output, so that proxies keep the "
        "connection; 0: none",
        unit="s",
    )
    ssl_certfile: str | None = option(
        None, help="file of the TLS certificate and its chain (PEM)", group=TLS
    )
    ssl_keyfile: str | None = option(
        None,
        help="file of the certificate's private key (PEM); unset: in --ssl-certfile",
        group=TLS,
    )
    ssl_ca_certs: str | None = option(
        None,
        help="file of certificates (PEM); clients must have a certificate that one of them signed",
        group=TLS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        help="origin of web pages that may use the server, such as https://chat.example; * for all",
        group=CORS,
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), help="method that such a page may use", group=CORS
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), help="request header that such a page may send", group=CORS
    )
    allow_credentials: bool = option(
        False, help="allow such a page to send cookies; needs origins other than *", group=CORS
    )
    access_log: bool = option(
        True, help="write one log line per request to standard error; without prompts and keys"
    )
    log_format: LogFormat = option("text", help="format of log lines")
    log_level: LogLevel = option("info", help="least level of log lines")
    metrics_names: MetricNames = option(
        "quire",
        help="names of the metrics at /metrics: quire (quire_...), vllm (vllm:..., for boards and "
        "autoscalers made for vLLM) or both",
        group=OBSERVATION,
    )
    metrics_key: str | None = option(
        None,
        help="API key that gives access to /metrics only; or the environment variable "
        f"{METRICS_KEY_VARIABLE}. Unset: /metrics needs no key, or, if tenants have keys, a key of "
        "tenant default",
        group=OBSERVATION,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        help="URL of a collector of OpenTelemetry (OTLP over HTTP), such as http://localhost:4318, "
        "that gets a trace of every request; unset: no traces",
        group=OBSERVATION,
    )
    chat_template: str | None = option(
        None,
        help="file with a Jinja chat template, or the template itself, instead of the model's",
    )
    tool_parser: ToolParserName = option(
        "auto",
        help="format of the model's tool calls: hermes (also Qwen), llama3_json, mistral, or auto "
        "(detected from the chat template)",
        synonyms=("tool-call-parser",),
    )
    unknown_fields: Literal["refuse", "warn"] = option(
        "warn",
        help="response to unknown request fields: refuse (status 400) or warn (a log line and the "
        "response header X-Ignored-Fields); a field that is almost a known one is refused always",
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
        "the connection is closed; with TLS it starts after the handshake, which may take 60 s",
        unit="s",
    )
    timeout_keep_alive: float = option(
        75.0,
        help="time in seconds that a connection without requests stays open; longer than that of a "
        "proxy before the server, such as 60 s of nginx",
        unit="s",
    )
    tokenizer_threads: int = option(
        2,
        help="tokenizer threads; with more than one, a tenant can use all except one",
    )

    def has_dashboard(self, *, with_keys: bool) -> bool:
        """Whether the dashboard and texts of tokens are served.

        Without keys every client is the same tenant. Then by default only clients of this machine
        may see the prompts of other clients.
        """
        if self.dashboard is not None:
            return self.dashboard
        return with_keys or is_loopback(self.host)

    def key_of_metrics(self) -> str | None:
        """The API key of /metrics: the option, else the environment variable; None: unset."""
        key = self.metrics_key or os.environ.get(METRICS_KEY_VARIABLE) or None
        if key is not None:
            check_key(key, f"--metrics-key or {METRICS_KEY_VARIABLE}")
        return key

    def check_files(self) -> None:
        """Refuse files that cannot be read, before the model is loaded."""
        template = None if "{" in (self.chat_template or "") else self.chat_template
        files = {
            "--ssl-certfile": self.ssl_certfile,
            "--ssl-keyfile": self.ssl_keyfile,
            "--ssl-ca-certs": self.ssl_ca_certs,
            "--chat-template": template,
        }
        for flag, path in files.items():
            if path is not None:
                _require_readable(flag, path)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.host:
            raise ConfigError(
                "expected a host address, got an empty string: use 0.0.0.0 for all addresses of "
                "this machine, or leave it out"
            )
        if not 0 <= self.port <= LARGEST_PORT:
            raise ConfigError(f"expected a port from 0 to {LARGEST_PORT}, got {self.port}")
        if self.served_model_name == "" or find_fault(self.served_model_name):
            raise ConfigError(
                "expected a served-model-name that is Unicode and not empty, got "
                f"{self.served_model_name!r}; leave it out for the model's name"
            )
        if not self.max_body:
            raise ConfigError("expected a max-body of at least 1 byte, got 0")
        self._check_limits()
        self._check_security()
        if not 1 <= self.tokenizer_threads <= MAX_TOKENIZER_THREADS:
            raise ConfigError(
                f"expected 1 to {MAX_TOKENIZER_THREADS} tokenizer-threads, got "
                f"{self.tokenizer_threads}"
            )

    def _check_limits(self) -> None:
        for name in _LEAST:
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"expected {flag} >= 1, got {value}: leave it out for no limit")
        if self.stream_interval < 1:
            raise ConfigError(
                f"expected stream-interval of 1 token or more, got {self.stream_interval}"
            )
        for name in ("header_timeout", "timeout_keep_alive"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"expected {name.replace('_', '-')} > 0 seconds, got {value}")
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"expected {name.replace('_', '-')} >= 0 seconds, got {value}")

    def _check_security(self) -> None:
        if self.metrics_key is not None:
            check_key(self.metrics_key, "--metrics-key")
        url = self.otlp_traces_endpoint
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"expected --otlp-traces-endpoint as a URL such as http://localhost:4318, got {url}"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError(
                "expected --ssl-certfile with --ssl-keyfile or --ssl-ca-certs, got none: without a "
                "certificate the server has no TLS"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "expected --allowed-origins as * or SCHEME://HOST, such as "
                    f"https://chat.example, got {origin!r}: repeat the flag for each origin, "
                    "without a path"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "expected --allowed-origins other than * with --allow-credentials: browsers refuse "
                "cookies for every origin"
            )


def _require_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}; expected a file") from None


def check_key(key: str, owner: str) -> None:
    """Refuse an API key that is easily guessed, or that a header cannot contain."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{owner}: expected at least {MIN_KEY_CHARACTERS} printable ASCII characters, got "
            f"{len(key)} characters; choose another key"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address, which only programs of this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
