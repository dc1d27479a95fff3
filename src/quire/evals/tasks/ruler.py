"""RULER's tasks with several answers: `niah_multivalue`, `niah_multiquery`, `tracking`, `cwe`.

Source: RULER (Hsieh et al. 2024), with its wording and numbers. An output is scored by the fraction
of the answers that it contains.

Differs from the paper: keys are word pairs and words are those of the other tasks. The running text
is the filler of the setting. `tracking` and `cwe` have no worked example, which the paper adds.
"""

import random
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.evals.tasks.base import (
    Burial,
    Setting,
    Task,
    TaskFamily,
    TaskQuery,
    bury,
    distinct_keys,
    letters,
    number,
    running_text,
)
from quire.evals.tasks.words import vocabulary

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

    def _query(self, program: list[_Variable], index: int) -> TaskQuery:
        variable = program[index]
        return TaskQuery(
            question=f"value of {variable.name} is ",
            answer=variable.value,
            depth=index / max(1, len(program) - 1),
        )


def _choose(rng: random.Random, wanted: list[int], count: int, depth: float | None) -> int:
    """A random assignment of the requested kind, or the assignment nearest to `depth`."""
    if depth is None:
        return rng.choice(wanted)
    return min(wanted, key=lambda index: abs(index / max(1, count - 1) - depth))


_NEEDLES_INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
_MAX_SHARE = 0.7
"""Largest fraction of the length for needles or assignments; the rest is running text."""


def _needle(key: str, value: str) -> str:
    return f"\nOne of the special magic numbers for {key} is: {value}.\n"


def _refuse_many(name: str, count: int, tokens: int, setting: Setting) -> None:
    if tokens > _MAX_SHARE * setting.tokens:
        raise ConfigError(
            f"expected more than {int(tokens / _MAX_SHARE)} tokens for {count} records of task "
            f"{name!r}, got {setting.tokens}; raise --tokens"
        )


def _buried(
    rng: random.Random, name: str, statements: list[str], question: str, setting: Setting
) -> Burial:
    """Running text with locations for all statements, in their order.

    Statements at a depth would all be at one location, so their depths are random.
    """
    statement_tokens = setting.measure("".join(statements))
    _refuse_many(name, len(statements), statement_tokens, setting)
    used = statement_tokens + setting.measure(question)
    text = running_text(rng, max(24, setting.tokens - used), setting)
    return bury(rng, text, len(statements), None, in_order=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiValue(TaskFamily):
    """Several needles of one key, all of which are queried.

    Attributes:
        values: number of needles of the key.
        digits: length of a number.
    """

    values: int = 4
    digits: int = 6

    def build(self, rng: random.Random, setting: Setting) -> Task:
        [key] = distinct_keys(rng, 1, setting.split)
        values = _distinct_numbers(rng, self.values, self.digits)
        question = (
            f"\nWhat are all the special magic numbers for {key} mentioned in the provided text? "
            f"The special magic numbers for {key} mentioned in the provided text are "
        )
        statements = [_needle(key, value) for value in values]
        return _needles_task(rng, "niah_multivalue", statements, question, values, setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiQuery(TaskFamily):
    """Needles of several keys, all of which are queried at once.

    Attributes:
        keys: number of needles.
        digits: length of a number.
    """

    keys: int = 4
    digits: int = 6

    def build(self, rng: random.Random, setting: Setting) -> Task:
        keys = distinct_keys(rng, self.keys, setting.split)
        values = _distinct_numbers(rng, self.keys, self.digits)
        listed = ", ".join(keys[:-1]) + f", and {keys[-1]}"
        question = (
            f"\nWhat are all the special magic numbers for {listed} mentioned in the provided "
            f"text? The special magic numbers for {listed} mentioned in the provided text are "
        )
        statements = list(map(_needle, keys, values))
        return _needles_task(rng, "niah_multiquery", statements, question, values, setting)


def _needles_task(
    rng: random.Random,
    name: str,
    statements: list[str],
    question: str,
    answers: list[str],
    setting: Setting,
) -> Task:
    burial = _buried(rng, name, statements, _NEEDLES_INTRO + question, setting)
    query = TaskQuery(question=question, answer=", ".join(answers), answers=tuple(answers))
    spans = ((_NEEDLES_INTRO, 0.0), *burial.spans(statements))
    return Task(name=name, spans=spans, queries=(query,))


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableTracking(TaskFamily):
    """A chain of assignments in running text; all variables with the first value are queried.

    Attributes:
        hops: assignments of one variable to the next.
        chains: number of chains; the others have other values.
        digits: length of a value.
    """

    hops: int = 4
    chains: int = 1
    digits: int = 5

    def build(self, rng: random.Random, setting: Setting) -> Task:
        values = _distinct_numbers(rng, self.chains, self.digits)
        count = self.chains * (self.hops + 1)
        found: dict[str, None] = {}
        while len(found) < count:
            found[letters(rng, 5)] = None
        names = list(found)
        chains = [names[index :: self.chains] for index in range(self.chains)]
        statements = [
            f"\nVAR {chain[hop]} = {f'VAR {chain[hop - 1]}' if hop else value}\n"
            for hop in range(self.hops + 1)
            for chain, value in zip(chains, values, strict=True)
        ]
        intro = "Memorize and track the chain(s) of variable assignment hidden in the text.\n\n"
        question = (
            f"\nQuestion: Find all variables that are assigned the value {values[0]} in the text "
            f"above. Answer: According to the chain(s) of variable assignment in the text above, "
            f"{self.hops + 1} variables are assigned the value {values[0]}, they are: "
        )
        burial = _buried(rng, "tracking", statements, intro + question, setting)
        query = TaskQuery(question=question, answer=" ".join(chains[0]), answers=tuple(chains[0]))
        spans = ((intro, 0.0), *burial.spans(statements))
        return Task(name="tracking", spans=spans, queries=(query,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWords(TaskFamily):
    """A numbered list of words, some of which are repeated more often; these are queried.

    Attributes:
        common: number of common words.
        common_times: how often a common word is in the list; the paper's 30, at short lengths as
            often as fits, and at least twice the others.
        other_times: how often another word is in the list.
    """

    common: int = 10
    common_times: int = 30
    other_times: int = 3

    def build(self, rng: random.Random, setting: Setting) -> Task:
        intro = (
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often.\n"
        )
        question = (
            f"\nQuestion: What are the {self.common} most common words in the above list? Answer: "
            f"The top {self.common} words that appear most often in the list are: "
        )
        entry_tokens = setting.measure("100. squirrel 101. shore " * 4) / 8
        room = (setting.tokens - setting.measure(intro + question)) / entry_tokens
        common, listed = self._listed(rng, int(room))
        text = " ".join(f"{index}. {word}" for index, word in enumerate(listed, start=1))
        numbered = [f"{index}. {word}" for index, word in enumerate(common, start=1)]
        query = TaskQuery(question=question, answer=" ".join(numbered), answers=tuple(common))
        return Task(name="cwe", spans=((intro, 0.0), (text, 0.0)), queries=(query,))

    def _listed(self, rng: random.Random, room: int) -> tuple[list[str], list[str]]:
        words = list(vocabulary("noun", "train") + vocabulary("adjective", "train"))
        rng.shuffle(words)
        common, others = words[: self.common], words[self.common :]
        most = max(room * 2 // 3 // self.common, 2 * self.other_times)
        times = min(self.common_times, most)
        left = room - times * self.common
        if left < self.other_times:
            raise ConfigError(
                f"expected room for {times * self.common + self.other_times} words of task 'cwe', "
                f"got {max(0, room)}; raise --tokens"
            )
        listed = common * times + others[: left // self.other_times] * self.other_times
        rng.shuffle(listed)
        return common, listed


def _distinct_numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[number(rng, digits)] = None
    return list(found)
