"""Brings models and the prompts of `quire.evals` to benches, which know nothing of tasks."""

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.common.asked import Asked, Asking
    from quire.cli.settings import Settings
    from quire.models.loader import LoadedModel


def load(settings: "Settings") -> "LoadedModel":
    """The model that was named, without a KV memory.

    Raises:
        ModelError: it cannot be read.
    """
    from quire.models.loader import load_model

    return load_model(
        settings.model,
        dtype=settings.loading.dtype,
        device=settings.loading.device,
        trust_remote_code=settings.loading.trust_remote_code,
        verify=settings.loading.verify,
        weights_memory=settings.loading.weights_memory,
    )


def asking_for(model: "LoadedModel") -> "Asking":
    """Prompts of any task, as long as this model counts.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    from quire.errors import ConfigError
    from quire.models.tokenizer import encode_prompt

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer: its quality cannot be asked for")

    def measure(text: str) -> int:
        return len(encode_prompt(tokenizer, text)) if text else 0

    def ask(task: str, tokens: int, n: int) -> "list[Asked]":
        from benchmarks.common.asked import Asked
        from quire.evals.questions import make_questions

        return [
            Asked(
                prompt=q.prompt,
                grade=partial(begins_with, q.answer),
                answer=q.answer,
                depth=q.place,
            )
            for q in make_questions(task, tokens, n, measure=measure)
        ]

    return ask


def begins_with(answer: str, text: str) -> float:
    """1 where a continuation begins with the answer, else 0."""
    return float(text.startswith(answer))
