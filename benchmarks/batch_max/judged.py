"""Answers prompts under an arm in static batches, and has them judged: quality and time at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.batch_max.running import answer_all, text_of
from benchmarks.common.graded_prompts import GradedPrompt
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.models.loader import LoadedModel
from quire.profile.step_rates import static_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Results of all prompts of one task under one variant.

    Attributes:
        task: name of the task.
        arm: name of the variant.
        batch: rows that started together.
        score: mean grade, 0 to 1.
        samples: number of prompts.
        total_s: time of all batches, including prefill.
        new_tokens: generated tokens.
        peak_bytes: peak KV memory in use.
        preemptions: preempted rows; their recompute time is part of `total_s`.
    """

    task: str
    arm: str
    batch: int
    score: float
    samples: int
    total_s: float
    new_tokens: int
    peak_bytes: int
    preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time."""
        return self.new_tokens / self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as token ids, with its judge."""

    tokens: tuple[int, ...]
    requested: GradedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How the prompts of a task are run under an arm.

    Attributes:
        arm: its name.
        kv: the memory, and what evicts.
        batch: rows that start together; divides the prompts.
        new_tokens: of each answer.
    """

    arm: str
    kv: KVConfig
    batch: int
    new_tokens: int


def judge(model: LoadedModel, task: str, prompts: Sequence[Encoded], how: Batches) -> Judged:
    """Answer and judge all prompts of a task.

    Raises:
        InvariantError: rows that were to run side by side did not.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    engine = Engine(model, how.kv, static_schedule(how.batch, longest))
    grades: list[float] = []
    total_s, preemptions = 0.0, 0
    for start in range(0, len(prompts), how.batch):
        together = prompts[start : start + how.batch]
        done = answer_all(engine, [prompt.tokens for prompt in together], how.new_tokens)
        if done.rows_peak != len(together):
            raise InvariantError(f"{done.rows_peak} rows of a batch of {len(together)} ran at once")
        total_s, preemptions = total_s + done.total_s, preemptions + done.preemptions
        texts = [text_of(model, answer) for answer in done.answers]
        grades += [
            prompt.requested.grade(text) for prompt, text in zip(together, texts, strict=True)
        ]
    engine.check()
    return Judged(
        task=task,
        arm=how.arm,
        batch=how.batch,
        score=sum(grades) / len(grades),
        samples=len(grades),
        total_s=total_s,
        new_tokens=how.new_tokens * len(grades),
        peak_bytes=engine.stats().kv_peak_bytes,
        preemptions=preemptions,
    )
