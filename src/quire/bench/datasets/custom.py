"""Requests of a file: one JSON object with a prompt or messages on each line."""

from collections.abc import Mapping

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.datasets.files import dataset_file
from quire.bench.prompts import BenchRequest, Prompt, PromptMaker
from quire.errors import ConfigError
from quire.sim.traces.reading import Row, json_rows

_FROM_FILE = -1


def custom_requests(
    config: BenchServeConfig, maker: PromptMaker, random: np.random.Generator
) -> list[BenchRequest]:
    """The first requests of the file, in its order.

    Raises:
        ConfigError: a line is invalid, or the file has no lines.
    """
    del random  # nothing is drawn
    path = dataset_file(config)
    found: list[BenchRequest] = []
    for row in json_rows(path):
        output = config.custom_output_len
        if output == _FROM_FILE:
            output = row.count("output_tokens", least=1)
        found.append(BenchRequest(_prompt(row, maker, is_chat=config.is_chat), max(1, output)))
        if len(found) == config.num_prompts:
            break
    if not found:
        raise ConfigError(f"{path.name} has no requests: expected one JSON object on each line")
    return found


def _prompt(row: Row, maker: PromptMaker, *, is_chat: bool) -> Prompt:
    messages, prompt = row.values.get("messages"), row.values.get("prompt")
    if is_chat and isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages):
        texts = (m["content"] for m in messages if isinstance(m.get("content"), str))
        return Prompt(messages, sum(map(maker.count, texts)))
    if isinstance(prompt, str) and prompt:
        return Prompt(prompt, maker.count(prompt))
    if not is_chat and isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        return Prompt(prompt, len(prompt))
    expected = "a text prompt, or messages" if is_chat else "a prompt: a text or token ids"
    raise row.error(expected, {name: row.values[name] for name in sorted(row.values)[:4]})
