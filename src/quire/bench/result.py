"""The result of a benchmark, with the keys of the files of `vllm bench serve`."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.bench.config import BenchServeConfig
from quire.bench.load import Run
from quire.bench.metrics import Numbers
from quire.errors import ConfigError

_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts")


def result_of(
    config: BenchServeConfig, run: Run, found: Numbers, *, model: str, tokenizer: str | None
) -> dict[str, Any]:
    """The result as JSON values: description of the run, metrics, and values of each request."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if config.is_chat else "openai",
        "backend": "openai-chat" if config.is_chat else "openai",
        "label": None,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": len(run.outcomes),
        **config.keys(),
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        **_ramp(config),
        **found,
        "input_lens": [one.prompt_tokens for one in run.outcomes],
        "output_lens": [one.output_tokens for one in run.outcomes],
        "ttfts": [one.ttft_s for one in run.outcomes],
        "itls": [one.itl_s for one in run.outcomes],
        "start_times": [one.start_s for one in run.outcomes],
        "generated_texts": [one.text for one in run.outcomes],
        "errors": [one.error for one in run.outcomes],
    }


def _ramp(config: BenchServeConfig) -> dict[str, Any]:
    if config.ramp_up_strategy == "none":
        return {}
    return {
        "ramp_up_strategy": config.ramp_up_strategy,
        "ramp_up_start_rps": config.ramp_up_start_rps,
        "ramp_up_end_rps": config.ramp_up_end_rps,
    }


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without the values of each request."""
    return {name: value for name, value in result.items() if name not in (*_DETAILS, "errors")}


def save(config: BenchServeConfig, result: Mapping[str, Any]) -> Path:
    """Write the result to its file, and return the path.

    Raises:
        ConfigError: the file cannot be written.
    """
    shown = dict(result) if config.save_detailed else without_details(result)
    path = Path(config.result_dir) / (config.result_filename or _name(result))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if config.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(shown) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _name(result: Mapping[str, Any]) -> str:
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2]
    rate, most = result["request_rate"], result["max_concurrency"]
    limit = "" if most is None else f"-concurrency{most}"
    return f"{result['backend']}-{rate}qps{limit}-{model}-{result['date']}.json"
