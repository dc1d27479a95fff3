"""Numbers hidden in running text: the task `niah` (needle in a haystack).

Source: Kamradt's needle test in RULER's wording (Hsieh et al. 2024). Keys are word pairs.
"""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import SAMPLE_KEY, bury, distinct_keys, number, running_text


def _needle(key: str, value: str) -> str:
    return f"\nOne of the special magic numbers for {key} is: {value}.\n"


def _question(key: str) -> str:
    return f"\nThe special magic number for {key} mentioned in the text is: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles(TaskFamily):
    """Sentences with a special magic number, inserted into prose.

    Attributes:
        digits: length of a number; None: 6 in an evaluation, 3 to 6 in training.
        needles: number of inserted needles; more than 1 is the multi-key variant. None: 1 for one
            query, a random number for several queries.
    """

    digits: int | None = None
    needles: int | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        digits = self.digits or (6 if setting.evaluates else rng.choice([3, 4, 5, 6]))
        wanted = self._wanted(rng, setting)
        needle_tokens = setting.measure(_needle(SAMPLE_KEY, number(rng, digits)))
        query_tokens = setting.measure(_question(SAMPLE_KEY)) + digits + 1
        count = max(1, min(wanted, int(0.6 * setting.tokens / (needle_tokens + query_tokens))))
        queries = setting.queries or count
        room = max(24, setting.tokens - count * needle_tokens - queries * query_tokens)
        text = running_text(rng, room, setting)
        keys = distinct_keys(rng, count, setting.split)
        values = [number(rng, digits) for _ in keys]
        burial = bury(rng, text, count, setting.depth, in_order=True)
        requested = tuple(
            Query(
                question=_question(keys[index]),
                answer=values[index],
                tail=".",
                depth=burial.depth(index),
                key=keys[index],
            )
            for index in burial.asking_order(rng, queries)
        )
        spans = burial.spans(list(map(_needle, keys, values)))
        return Task(name="niah", spans=spans, queries=requested)

    def _wanted(self, rng: random.Random, setting: Setting) -> int:
        if self.needles:
            return self.needles
        if setting.queries == 1:
            return 1
        return rng.choice([1, 2, 4, 8, max(2, setting.tokens // 64)])
