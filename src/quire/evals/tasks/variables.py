"""Assignments, some of one variable to another: `variables`. One hop needs two lookups."""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import letters, number

_INDIRECT_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    name: str
    source: str
    value: str
    hops: int

    @property
    def line(self) -> str:
        return f"VAR {self.name} = {self.source}\n"


def _program(rng: random.Random, count: int, digits: int) -> list[_Variable]:
    """`count` assignments to different names; every variable is assigned before its use."""
    direct: list[_Variable] = []
    variables: dict[str, _Variable] = {}
    while len(variables) < count:
        name = letters(rng, 3)
        if name in variables:
            continue
        if direct and rng.random() < _INDIRECT_SHARE:
            source = rng.choice(direct)
            variables[name] = _Variable(name=name, source=source.name, value=source.value, hops=1)
        else:
            value = number(rng, digits)
            variables[name] = _Variable(name=name, source=value, value=value, hops=0)
            direct.append(variables[name])
    return list(variables.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables(TaskFamily):
    """`VAR ABC = 123`, `VAR XYZ = ABC`, then `value of XYZ is`.

    Attributes:
        digits: length of a value; None: 3 in an evaluation, 2 to 4 in training.
        hops: 0: questions about direct assignments; 1: about indirect assignments; None: both.
    """

    digits: int | None = None
    hops: int | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        digits = self.digits or (3 if setting.evaluates else rng.choice([2, 3, 4]))
        line_tokens = setting.measure("VAR ABC = 1234\n" * 8) / 8
        query_tokens = setting.measure("value of ABC is 123\n" * 8) / 8
        queries = setting.queries or max(1, int(setting.tokens * 0.35 / query_tokens))
        count = max(2, int((setting.tokens - queries * query_tokens) / line_tokens))
        program = _program(rng, count, digits)
        every = range(count)
        wanted = [i for i in every if self.hops in (None, program[i].hops)] or list(every)
        requested = tuple(
            self._query(program, _choose(rng, wanted, count, setting.depth)) for _ in range(queries)
        )
        context = "".join(variable.line for variable in program)
        return Task(name="variables", spans=((context, 0.0),), queries=requested)

    def _query(self, program: list[_Variable], index: int) -> Query:
        variable = program[index]
        return Query(
            question=f"value of {variable.name} is ",
            answer=variable.value,
            depth=index / max(1, len(program) - 1),
        )


def _choose(rng: random.Random, wanted: list[int], count: int, depth: float | None) -> int:
    """A random assignment of the requested kind, or the assignment nearest to `depth`."""
    if depth is None:
        return rng.choice(wanted)
    return min(wanted, key=lambda index: abs(index / max(1, count - 1) - depth))
