"""Prompts with a judge, as benches of quality get them from whoever knows the tasks."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.models.loader import LoadedModel

Grade = Callable[[str], float]
"""What a model wrote behind a prompt to a score from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt.

    Attributes:
        prompt: text.
        grade: judges a continuation.
        answer: what counts as right, to know how long an answer must be.
        depth: place in the prompt of what is asked, 0 first to 1 last; None: no single place.
    """

    prompt: str
    grade: Grade
    answer: str = ""
    depth: float | None = None


Asking = Callable[[str, int, int], list[Asked]]
"""(task, most tokens of a prompt with its answer, how many) to prompts, always the same ones."""

AskingFor = Callable[[LoadedModel], Asking]
"""Prompts whose lengths are counted as a model counts them."""
