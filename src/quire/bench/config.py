"""Options of `quire bench serve`, with the names and meanings of `vllm bench serve`."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, no_type_check
from urllib.parse import SplitResult

from quire.bench.option_checks import LEAST, check_ramp, is_positive, pairs, server_url
from quire.errors import ConfigError
from quire.layout.options import check_options, option

DatasetName = Literal["random", "prefix_repetition", "sharegpt", "timed_trace", "custom"]
Backend = Literal["openai", "vllm", "openai-chat"]
RampUp = Literal["none", "linear", "exponential"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_DATA, _LOAD, _SAMPLING, _RESULT = "Data set", "Load", "Sampling", "Result"


@no_type_check  # run-time type checks in tests must not precede ConfigError
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeConfig:
    """How a server is measured.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value out of range, or options that contradict each other.
    """

    base_url: str = option(
        "", help="URL of the server, such as http://gpu1:8000; replaces host and port", common=True
    )
    host: str = option("127.0.0.1", help="host of the server", common=True)
    port: int = option(8000, help="port of the server", common=True)
    backend: Backend = option(
        "openai", help="API of the server: openai or vllm for completions, openai-chat for chats"
    )
    endpoint: str | None = option(
        None,
        help="path of the API; a path that ends with /chat/completions: chats; unset: "
        f"{COMPLETIONS}, or {CHAT} with --backend openai-chat",
        common=True,
    )
    model: str | None = option(
        None, help="model name in the requests; unset: the first model of /v1/models", common=True
    )
    tokenizer: str | None = option(
        None,
        help="folder, hub name or quire-tiny of the tokenizer that makes the prompts; unset: the "
        "model of the server",
    )
    vocab_size: int | None = option(
        None,
        help="prompts are random token ids below this number, without a tokenizer; only for "
        "completions",
    )
    api_key: str | None = option(
        None, help="key of the server; unset: environment variable OPENAI_API_KEY"
    )
    header: tuple[str, ...] = option((), help="further header of each request, as NAME=VALUE")

    dataset_name: DatasetName = option(
        "random", help="data set of the requests", group=_DATA, common=True
    )
    dataset_path: str | None = option(
        None, help="file of sharegpt, timed_trace or custom", group=_DATA, common=True
    )
    num_prompts: int = option(
        100, help="number of requests; of a file the first ones", group=_DATA, common=True
    )
    random_input_len: int = option(
        512,
        help="random: prompt length in tokens",
        group=_DATA,
        common=True,
        synonyms=("input-len",),
    )
    random_output_len: int = option(
        64,
        help="random: output length in tokens",
        group=_DATA,
        common=True,
        synonyms=("output-len",),
    )
    random_range_ratio: float = option(
        0.0,
        help="random: lengths vary uniformly between (1 - ratio) and (1 + ratio) times the length",
        group=_DATA,
    )
    random_prefix_len: int = option(
        0, help="random: tokens at the start that all prompts share", group=_DATA
    )
    prefix_repetition_prefix_len: int = option(
        256, help="prefix_repetition: length of a shared prefix in tokens", group=_DATA
    )
    prefix_repetition_suffix_len: int = option(
        256, help="prefix_repetition: length of a prompt after its prefix in tokens", group=_DATA
    )
    prefix_repetition_num_prefixes: int = option(
        10, help="prefix_repetition: number of prefixes", group=_DATA
    )
    prefix_repetition_output_len: int = option(
        128, help="prefix_repetition: output length in tokens", group=_DATA
    )
    sharegpt_output_len: int | None = option(
        None,
        help="sharegpt: output length in tokens; unset: that of the recorded reply",
        group=_DATA,
    )
    custom_output_len: int = option(
        256,
        help="custom: output length in tokens; -1: `output_tokens` of each line",
        group=_DATA,
    )
    max_length: int | None = option(
        None, help="timed_trace: longer requests (prompt and output) are skipped", group=_DATA
    )
    length_scale: float = option(
        1.0, help="timed_trace: scale factor of prompt and output lengths", group=_DATA
    )
    time_scale: float = option(
        1.0, help="timed_trace: scale factor of the times between arrivals", group=_DATA
    )

    request_rate: float = option(
        math.inf,
        help="requests per second; inf: all at once, or at the times of a timed_trace",
        unit="requests per second",
        group=_LOAD,
        common=True,
    )
    burstiness: float = option(
        1.0,
        help="shape of the gamma distribution of the times between arrivals; 1: Poisson arrivals, "
        "lower: more bursts",
        group=_LOAD,
    )
    ramp_up_strategy: RampUp = option(
        "none",
        help="increase the request rate during the run from --ramp-up-start-rps to "
        "--ramp-up-end-rps",
        group=_LOAD,
    )
    ramp_up_start_rps: float | None = option(None, help="request rate at the start", group=_LOAD)
    ramp_up_end_rps: float | None = option(None, help="request rate at the end", group=_LOAD)
    max_concurrency: int | None = option(
        None,
        help="most requests in flight; further ones wait in the client; unset: no limit",
        group=_LOAD,
        common=True,
    )
    num_warmups: int = option(
        0, help="requests that are sent before the measured ones", group=_LOAD, common=True
    )
    request_timeout: float = option(
        21_600.0, help="time limit of a request", unit="seconds", group=_LOAD
    )
    seed: int = option(0, help="seed of prompts and arrivals", group=_LOAD)

    ignore_eos: bool = option(
        False,
        help="send ignore_eos, so that outputs have their full length",
        group=_SAMPLING,
        common=True,
    )
    temperature: float | None = option(0.0, help="temperature of the requests", group=_SAMPLING)
    top_p: float | None = option(None, help="top_p of the requests", group=_SAMPLING)
    top_k: int | None = option(None, help="top_k of the requests", group=_SAMPLING)
    extra_body: str = option(
        "", help="further fields of each body, as a JSON object", group=_SAMPLING
    )

    goodput: tuple[str, ...] = option(
        (),
        help="service level of a good request, as ttft:MS, tpot:MS or e2el:MS",
        group=_RESULT,
        common=True,
    )
    metric_percentiles: str = option(
        "99", help="percentiles of the latencies, separated by commas", group=_RESULT
    )
    save_result: bool = option(
        False, help="write the result as a JSON file", group=_RESULT, common=True
    )
    save_detailed: bool = option(
        False,
        help="the file also has the lengths, times, texts and errors of each request",
        group=_RESULT,
    )
    append_result: bool = option(
        False, help="append the result to the file as one line", group=_RESULT
    )
    result_dir: str = option("", help="folder of the file", group=_RESULT)
    result_filename: str = option("", help="name of the file", group=_RESULT)
    metadata: tuple[str, ...] = option((), help="key of the result, as KEY=VALUE", group=_RESULT)

    def __post_init__(self) -> None:
        check_options(self)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # also NaN
                flag = name.replace("_", "-")
                raise ConfigError(f"expected --{flag} of {least} or more, got {value}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"expected --random-range-ratio from 0 to below 1, got {self.random_range_ratio}"
            )
        check_ramp(self)
        if self.vocab_size is not None and self.is_chat:
            raise ConfigError(
                "--vocab-size makes prompts of token ids, which chats do not accept: use "
                f"--endpoint {COMPLETIONS}, or --tokenizer"
            )
        if self.backend == "openai-chat" and not self.is_chat:
            raise ConfigError(
                f"expected an --endpoint of chats such as {CHAT} with --backend openai-chat, got "
                f"{self.endpoint}: leave one of them out"
            )
        for parse in (self.slos, self.percentiles, self.extra_fields, self.headers, self.keys):
            parse()  # invalid values are refused before any request

    @property
    def is_chat(self) -> bool:
        """Whether requests are chats."""
        return self.path.rstrip("/").endswith("/chat/completions")

    @property
    def path(self) -> str:
        """Path of the API."""
        return self.endpoint or (CHAT if self.backend == "openai-chat" else COMPLETIONS)

    @property
    def url(self) -> SplitResult:
        """URL of the server without /v1, which the paths of requests contain.

        Raises:
            ConfigError: not an HTTP URL.
        """
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return server_url(self.base_url or f"http://{shown}:{self.port}")

    def slos(self) -> dict[str, float]:
        """Limits of a good request in milliseconds, by metric.

        Raises:
            ConfigError: not NAME:MS, an unknown metric, or a limit of 0 or less.
        """
        found: dict[str, float] = {}
        for text in ",".join(self.goodput).split(","):
            if not text.strip():
                continue
            name, _, limit = text.strip().partition(":")
            if name not in GOODPUT_METRICS or not is_positive(limit):
                raise ConfigError(
                    f"expected --goodput as ttft:MS, tpot:MS or e2el:MS, got {text!r}"
                )
            found[name] = float(limit)
        return found

    def percentiles(self) -> tuple[float, ...]:
        """Percentiles of the result.

        Raises:
            ConfigError: not numbers from 0 to 100.
        """
        try:
            found = tuple(float(text) for text in self.metric_percentiles.split(","))
        except ValueError:
            found = (math.nan,)
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError(
                "expected --metric-percentiles as numbers from 0 to 100, separated by commas, got "
                f"{self.metric_percentiles!r}"
            )
        return found

    def extra_fields(self) -> dict[str, Any]:
        """Further fields of each body.

        Raises:
            ConfigError: not a JSON object.
        """
        try:
            found = json.loads(self.extra_body or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"expected --extra-body as a JSON object, got {self.extra_body!r}")
        return found

    def headers(self) -> dict[str, str]:
        """Further headers of each request."""
        return pairs("header", self.header)

    def keys(self) -> dict[str, str]:
        """Further keys of the result."""
        return pairs("metadata", self.metadata)
