"""Models, and prompts whose continuations are graded, for quality benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cli.settings import Settings
    from quire.models.loader import LoadedModel

Grade = Callable[[str], float]
"""Maps a continuation to a score from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedPrompt:
    """One prompt with its grading function.

    Attributes:
        prompt: text.
        grade: scores a continuation.
        answer: the correct answer; its length gives the number of tokens to generate.
        depth: position in the prompt of the fact in question (0 first, 1 last); None: no single
            position.
    """

    prompt: str
    grade: Grade
    answer: str = ""
    depth: float | None = None


PromptMaker = Callable[[str, int, int], list[GradedPrompt]]
"""Maps (task, most tokens of prompt and answer, number of prompts) to deterministic prompts."""

PromptMakerFor = Callable[["LoadedModel"], PromptMaker]
"""Returns the prompt maker that counts lengths in tokens of the given model."""


def load(settings: "Settings") -> "LoadedModel":
    """Load the selected model without a KV memory.

    Raises:
        ModelError: the model cannot be loaded.
    """
    from quire.models.loader import load_model
    from quire.offload.weights.placement import place_beyond

    return load_model(
        settings.model,
        dtype=settings.loading.dtype,
        device=settings.loading.device,
        trust_remote_code=settings.loading.trust_remote_code,
        verify=settings.loading.verify,
        placer=place_beyond(settings.loading.weights_memory),
        model_impl=settings.loading.model_impl,
        weight_codec=settings.loading.weight_codec,
    )


def prompt_maker_for(model: "LoadedModel") -> PromptMaker:
    """Return the prompt maker for a model; prompt lengths are in its tokens.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    from quire.errors import ConfigError
    from quire.models.tokenizer import encode_prompt

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; a quality benchmark needs one")

    def measure(text: str) -> int:
        return len(encode_prompt(tokenizer, text)) if text else 0

    def make_prompts(task: str, tokens: int, n: int) -> list[GradedPrompt]:
        from quire.evals.questions import make_questions

        return [
            GradedPrompt(
                prompt=q.prompt,
                grade=partial(begins_with, q.answer),
                answer=q.answer,
                depth=q.place,
            )
            for q in make_questions(task, tokens, n, measure=measure)
        ]

    return make_prompts


def begins_with(answer: str, text: str) -> float:
    """1 if a continuation begins with the answer, else 0."""
    return float(text.startswith(answer))
