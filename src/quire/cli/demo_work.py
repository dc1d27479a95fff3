"""Prompts of `quire demo`: GSM8K questions, and retrieval prompts with a known answer."""

import json
from dataclasses import dataclass
from importlib.resources import files

from quire.errors import ConfigError
from quire.evals.gate import DOCUMENT_START
from quire.evals.tasks import Measure, make
from quire.evals.tasks.words import haystack

NUM_QUESTIONS = 64
FACT_TASKS = ("kv", "niah")
FACT_TOKENS = 256
FACT_SHARE = 8
"""One in `FACT_SHARE` prompts is a retrieval prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """A prompt of the demo.

    Attributes:
        text: the prompt.
        max_tokens: maximum output tokens.
        answer: expected beginning of the output; None for a question without a check.
    """

    text: str
    max_tokens: int
    answer: str | None = None


def demo_prompts(count: int, max_tokens: int, measure: Measure) -> list[DemoPrompt]:
    """Create the prompts of the demo; they are equal on every machine.

    Args:
        count: number of prompts; one in eight asks for a record in its context.
        max_tokens: maximum output tokens for a question.
        measure: returns the number of tokens of a text.

    Raises:
        ConfigError: the count is below 1 or above the number of questions.
    """
    if not 1 <= count <= NUM_QUESTIONS:
        raise ConfigError(f"expected 1 to {NUM_QUESTIONS} requests, got {count}")
    texts = questions()
    return [
        fact_prompt(index // FACT_SHARE, measure)
        if index % FACT_SHARE == FACT_SHARE - 1
        else DemoPrompt(text=DOCUMENT_START + texts[index], max_tokens=max_tokens)
        for index in range(count)
    ]


def questions() -> list[str]:
    """The first questions of GSM8K's test set."""
    lines = (files("quire") / "assets" / "gsm8k_64.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["question"] for line in lines.split("\n") if line]


def fact_prompt(index: int, measure: Measure) -> DemoPrompt:
    """Create a prompt that asks for a record in its context; deterministic for an index."""
    name = FACT_TASKS[index % len(FACT_TASKS)]
    task = make(name, index, FACT_TOKENS, filler=haystack(), measure=measure)
    answer = task.queries[0].answer
    return DemoPrompt(
        text=DOCUMENT_START + task.prompt(), max_tokens=measure(answer), answer=answer
    )
