"""Run graded prompts with an arm in static batches: quality and time from the same runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.batch_max.running import generate_all, text_of
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
    """A prompt as token ids, with its grading function."""

    tokens: tuple[int, ...]
    graded: GradedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Configuration of a task's runs with one arm.

    Attributes:
        arm: name of the arm.
        kv: KV memory and eviction.
        batch: rows that start together; divides the number of prompts.
        new_tokens: tokens of each output.
    """

    arm: str
    kv: KVConfig
    batch: int
    new_tokens: int


def judge(model: LoadedModel, task: str, prompts: Sequence[Encoded], batches: Batches) -> Judged:
    """Run and grade all prompts of a task.

    Raises:
        InvariantError: the rows of a batch did not all run at the same time.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    engine = Engine(model, batches.kv, static_schedule(batches.batch, longest))
    grades: list[float] = []
    total_s, preemptions = 0.0, 0
    for start in range(0, len(prompts), batches.batch):
        together = prompts[start : start + batches.batch]
        done = generate_all(engine, [prompt.tokens for prompt in together], batches.new_tokens)
        if done.rows_peak != len(together):
            raise InvariantError(
                f"expected {len(together)} rows to run at the same time, got {done.rows_peak}"
            )
        total_s, preemptions = total_s + done.total_s, preemptions + done.preemptions
        texts = [text_of(model, answer) for answer in done.answers]
        grades += [prompt.graded.grade(text) for prompt, text in zip(together, texts, strict=True)]
    engine.check()
    return Judged(
        task=task,
        arm=batches.arm,
        batch=batches.batch,
        score=sum(grades) / len(grades),
        samples=len(grades),
        total_s=total_s,
        new_tokens=batches.new_tokens * len(grades),
        peak_bytes=engine.stats().kv_peak_bytes,
        preemptions=preemptions,
    )
