"""Conversations in the format of ShareGPT: the first turn is the prompt, the second the output."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.datasets.files import dataset_file
from quire.bench.prompts import BenchRequest, Prompt, PromptMaker
from quire.errors import ConfigError

LEAST_TOKENS = 4
MOST_PROMPT_TOKENS, MOST_TOKENS = 1024, 2048
"""Limits of vLLM's benchmark: shorter and longer conversations are skipped."""


def sharegpt_requests(
    config: BenchServeConfig, maker: PromptMaker, random: np.random.Generator
) -> list[BenchRequest]:
    """Requests of conversations in random order.

    Raises:
        ConfigError: the file is not such a list, or has no conversation of a suitable length.
    """
    path = dataset_file(config)
    pairs = list(_pairs(path))
    found: list[BenchRequest] = []
    for place in random.permutation(len(pairs)):
        prompt, reply = pairs[place]
        prompt_tokens = maker.count(prompt)
        output = config.sharegpt_output_len or maker.count(reply)
        if _fits(prompt_tokens, output, is_fixed=config.sharegpt_output_len is not None):
            found.append(BenchRequest(Prompt(prompt, prompt_tokens), output))
        if len(found) == config.num_prompts:
            break
    if not found:
        raise ConfigError(
            f"{path.name} has no conversation with {LEAST_TOKENS} to {MOST_PROMPT_TOKENS} tokens "
            f"in its prompt and at most {MOST_TOKENS} in total"
        )
    return found


def _fits(prompt: int, output: int, *, is_fixed: bool) -> bool:
    least = min(prompt, prompt if is_fixed else output)
    return least >= LEAST_TOKENS and prompt <= MOST_PROMPT_TOKENS and prompt + output <= MOST_TOKENS


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"{path.name}: expected a JSON list of conversations")
    for number, conversation in enumerate(conversations, start=1):
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list) or not all(map(_is_turn, turns)):
            raise ConfigError(
                f'{path.name}, conversation {number}: expected {{"conversations": [{{"from", '
                '"value"}, ...]}'
            )
        if len(turns) > 1:
            yield turns[0]["value"], turns[1]["value"]


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)
