"""Checks of the options of `quire bench serve`."""

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from quire.errors import ConfigError

LEAST: Mapping[str, int | float] = {
    "num_prompts": 1,
    "vocab_size": 2,
    "random_input_len": 1,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 1,
    "prefix_repetition_suffix_len": 1,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "sharegpt_output_len": 1,
    "custom_output_len": -1,
    "request_rate": 1e-9,
    "burstiness": 1e-9,
    "ramp_up_start_rps": 1e-9,
    "ramp_up_end_rps": 1e-9,
    "max_concurrency": 1,
    "num_warmups": 0,
    "request_timeout": 1e-3,
    "seed": 0,
}


def check_ramp(config: Any) -> None:
    """Check the options of a rising request rate.

    Raises:
        ConfigError: an option is missing or has no effect.
    """
    ends = (config.ramp_up_start_rps, config.ramp_up_end_rps)
    if config.ramp_up_strategy == "none":
        if any(end is not None for end in ends):
            raise ConfigError(
                "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or "
                "exponential"
            )
        return
    if None in ends:
        raise ConfigError(
            f"--ramp-up-strategy {config.ramp_up_strategy} needs --ramp-up-start-rps and "
            "--ramp-up-end-rps"
        )
    if math.isfinite(config.request_rate):
        raise ConfigError("expected either --request-rate or --ramp-up-strategy, got both")


def server_url(text: str) -> SplitResult:
    """Parse the URL of a server, and remove /v1 from its end.

    Raises:
        ConfigError: not an HTTP URL.
    """
    try:
        found = urlsplit(text)
        valid = found.scheme in ("http", "https") and found.hostname and found.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"expected an http or https URL of a server, got {text!r}")
    return found._replace(path=found.path.rstrip("/").removesuffix("/v1"))


def is_positive(text: str) -> bool:
    """Whether a text is a positive finite number."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def pairs(option_name: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Parse values of the form NAME=VALUE.

    Raises:
        ConfigError: another form.
    """
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"expected --{option_name} as NAME=VALUE, got {text!r}")
        found[name.strip()] = value.strip()
    return found
