"""Few-shot sums of numbers with one or two digits: `arithmetic`, with held-out operands.

The length is estimated from four random examples. The length of worked sums varies: a prompt can
be twice as long as the target length. Reserve tokens for this, or measure the prompt.
"""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Span, Task, TaskFamily
from quire.evals.tasks.words import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """One kind of problem: the operand size, and whether the answer shows its working."""

    digits: int
    steps: bool

    def problem(self, rng: random.Random, split: Split) -> tuple[str, str]:
        """Question and answer with operands of one split."""
        top = 10**self.digits
        while True:
            left, right = rng.randrange(top), rng.randrange(top)
            sign = rng.choice("+-")
            if sign == "-" and right > left:
                left, right = right, left
            if _belongs(left, right, split):
                break
        question = f"Q: {left} {sign} {right}\nA: "
        if self.steps and self.digits == 2 and sign == "+":
            return question, _worked_addition(left, right)
        return question, str(left + right if sign == "+" else left - right)


def _belongs(left: int, right: int, split: Split) -> bool:
    """Eight in ten operand pairs belong to training, the others to the evaluation."""
    return ((left * 31 + right * 17) % 10 < 8) == (split == "train")


def _worked_addition(left: int, right: int) -> str:
    """The written method: units first, then tens with the carry."""
    units = left % 10 + right % 10
    carry = units // 10
    tens = left // 10 + right // 10 + carry
    return (
        f"{left % 10} + {right % 10} = {units}, "
        f"{left // 10} + {right // 10} + {carry} = {tens}, so {left + right}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(TaskFamily):
    """`Q: 17 + 25`, `A: 42` examples, then a question with held-out operands.

    Attributes:
        digits: 1 or 2; None: random.
        steps: answers show their working (two digits, addition); None: in 4 of 10 tasks.
    """

    digits: int | None = None
    steps: bool | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        digits = self.digits or rng.choice([1, 2])
        steps = rng.random() < 0.4 if self.steps is None else self.steps
        sums = _Sums(digits=digits, steps=steps)
        example_tokens = setting.measure("".join(_sample(rng, sums) for _ in range(4))) / 4
        only_last_counts = setting.queries == 1 and setting.evaluates
        weight = 0.0 if only_last_counts else 1.0
        spans: list[Span] = []
        for _ in range(max(2, int(setting.tokens / example_tokens) - 1)):
            question, answer = sums.problem(rng, "train")
            spans += [(question, 0.0), (f"{answer}\n", weight)]
        question, answer = sums.problem(rng, setting.split)
        query = Query(question=question, answer=answer)
        return Task(name="arithmetic", spans=tuple(spans), queries=(query,))


def _sample(rng: random.Random, sums: _Sums) -> str:
    """A text as long as an example: the question of one problem with the answer of another."""
    question, _ = sums.problem(rng, "train")
    _, answer = sums.problem(rng, "train")
    return f"{question}{answer}\n"
