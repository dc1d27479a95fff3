"""What `quire demo` asks: questions people wrote, and prompts whose answer can be checked."""

import json
from dataclasses import dataclass
from importlib.resources import files

from quire.errors import ConfigError
from quire.evals.questions import DOCUMENT_START
from quire.evals.tasks import Measure, make
from quire.evals.tasks.fillers import haystack

NUM_QUESTIONS = 64
FACT_TASKS = ("kv", "niah")
FACT_TOKENS = 256
FACT_SHARE = 8
"""One prompt in so many has an answer that can be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """A prompt of the demo.

    Attributes:
        text: what the model reads.
        max_tokens: of its answer.
        answer: what the continuation must begin with; None where nobody can say.
    """

    text: str
    max_tokens: int
    answer: str | None = None


def demo_prompts(count: int, max_tokens: int, measure: Measure) -> list[DemoPrompt]:
    """Prompts, the same on every machine.

    Args:
        count: how many; one in eight asks for a record that stands in its context.
        max_tokens: of an answer to a question.
        measure: tokens of a text.

    Raises:
        ConfigError: more than there are questions, or less than one.
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
    """A prompt that asks for a record in its own context; equal numbers make equal prompts."""
    name = FACT_TASKS[index % len(FACT_TASKS)]
    task = make(name, index, FACT_TOKENS, filler=haystack(), measure=measure)
    answer = task.queries[0].answer
    return DemoPrompt(
        text=DOCUMENT_START + task.prompt(), max_tokens=measure(answer), answer=answer
    )
