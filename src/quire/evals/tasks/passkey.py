"""A number in repeated sentences: `passkey`.

Source: Mohtashami and Jaggi 2023, with their wording. The text around the number has no other
number, so that a model needs no reading of a key.
"""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import number

_INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
_NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
_QUESTION = "What is the pass key? The pass key is "


@dataclass(frozen=True, slots=True, kw_only=True)
class Passkey(TaskFamily):
    """`The pass key is 48213. Remember it.` between repeated sentences.

    Attributes:
        digits: length of the number.
    """

    digits: int = 5

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        key = number(rng, self.digits)
        line = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
        used = setting.measure(_INTRO + line + _QUESTION)
        noise_tokens = setting.measure(_NOISE * 8) / 8
        count = max(1, int((setting.tokens - used) / noise_tokens))
        depth = rng.random() if setting.depth is None else setting.depth
        before = round(depth * count)
        spans = (
            (_INTRO + _NOISE * before, 0.0),
            (line, 0.0),
            (_NOISE * (count - before), 0.0),
        )
        query = Query(question=_QUESTION, answer=key, tail=".", depth=before / count)
        return Task(name="passkey", spans=spans, queries=(query,))
