"""Prompts of the papers' tasks for a model, and their scores under eviction rules and codecs.

Prompts come from a file of `--data TASK=FILE`. A task without a file has no prompts, or prompts of
`quire.evals` in its place, which the differences of the rows name.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.common import long_bench
from benchmarks.common.few_shot import TASKS as FEW_SHOT
from benchmarks.common.few_shot import Record, make_samples, read_records
from benchmarks.common.graded_prompts import prompt_maker_for
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.recorded import encoded_prompt, longest_that_fits
from benchmarks.paper.material import Material
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError, UnknownName
from quire.layout.eviction import PREFILL_END
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig

STAND_INS = ("lines", "kv", "niah", "facts")
"""Tasks of `quire.evals` on which eviction rules differ."""
FULL, PLAIN = "full", "none"

_ROWS = 8
_CACHED_OVER_KV = 1.5  # bytes of a cached prompt with recorded statistics, over its KV
_MAX_CACHED_BYTES = 4 << 30

Grader = Callable[[str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompts:
    """Prompts of one task.

    Attributes:
        name: name of the task.
        tokens: token ids of each prompt.
        graders: grading function of each prompt.
        new_tokens: length of each output.
        differences: differences from the paper's prompts.
    """

    name: str
    tokens: tuple[list[int], ...]
    graders: tuple[Grader, ...]
    new_tokens: int
    differences: tuple[str, ...] = ()

    def score(self, texts: Sequence[str]) -> float:
        """Mean grade of the outputs, 0 to 1."""
        return statistics.mean(g(text) for g, text in zip(self.graders, texts, strict=True))


def task_names() -> tuple[str, ...]:
    """Names of tasks for `--data`."""
    return tuple(dict.fromkeys((*FEW_SHOT, *long_bench.TASKS)))


def checked_task(name: str) -> str:
    """Check the name of a task.

    Raises:
        UnknownName: no such task.
    """
    if name not in task_names():
        raise UnknownName("task", name, task_names())
    return name


def has_examples(material: Material, task: str) -> bool:
    """Whether examples of a task are at hand."""
    return task in material.files


def few_shot_prompts(
    material: Material, task: str, *, tokens: int, prompts: int, new_tokens: int
) -> TaskPrompts:
    """Few-shot prompts with as many shots as fit; prompts too long without shots are truncated.

    Args:
        material: model and files.
        task: a task of `benchmarks.common.few_shot`.
        tokens: longest prompt.
        prompts: number of prompts; fewer if the file has fewer examples.
        new_tokens: length of an output.

    Raises:
        ConfigError: no examples, or too few for one prompt with its shots.
    """
    kind, records = FEW_SHOT[task], _records(material, task)
    count = min(prompts, len(records) - kind.shots)
    if count < 1:
        raise ConfigError(
            f"expected over {kind.shots} examples of {task}, got {len(records)}; name a longer "
            f"file with --data {task}=FILE"
        )
    by_shots = [
        make_samples(replace(kind, shots=shots), records, count)
        for shots in range(kind.shots, -1, -1)
    ]
    found = [longest_that_fits(one, material.model, tokens) for one in zip(*by_shots, strict=True)]
    whole = all(
        sample.prompt == most.prompt for (sample, _), most in zip(found, by_shots[0], strict=True)
    )
    return TaskPrompts(
        name=task,
        tokens=tuple(ids for _, ids in found),
        graders=tuple(partial(_judged, kind.judge, sample.references) for sample, _ in found),
        new_tokens=new_tokens,
        differences=() if whole else (f"fewer shots: prompts of at most {tokens:,} tokens",),
    )


def _judged(
    judge: Callable[[str, Sequence[str]], float], references: tuple[str, ...], text: str
) -> float:
    return judge(text, references)


def _records(material: Material, task: str) -> Sequence[Record]:
    if not has_examples(material, task):
        raise ConfigError(f"expected examples of {task}, got none; name them: --data {task}=FILE")
    return read_records(material.files[task])


def long_bench_prompts(material: Material, task: str, *, tokens: int, prompts: int) -> TaskPrompts:
    """Prompts of a LongBench data set; the middle of longer prompts is cut, as in LongBench.

    Raises:
        ConfigError: no file of this data set, or an example without its fields.
    """
    kind = long_bench.TASKS[task]
    records = _records(material, task)[:prompts]
    examples = [long_bench.example_of(task, record) for record in records]
    encoded = [encoded_prompt(material.model, example.prompt) for example in examples]
    cut = any(len(ids) > tokens for ids in encoded)
    return TaskPrompts(
        name=task,
        tokens=tuple(_without_middle(ids, tokens) for ids in encoded),
        graders=tuple(partial(long_bench.grade, task, example) for example in examples),
        new_tokens=kind.new_tokens,
        differences=(f"prompts cut to {tokens:,} tokens",) if cut else (),
    )


def _without_middle(ids: list[int], most: int) -> list[int]:
    return ids if len(ids) <= most else ids[: most // 2] + ids[len(ids) - (most - most // 2) :]


def stand_in_prompts(
    material: Material, instead_of: str, task: str, *, tokens: int, prompts: int
) -> TaskPrompts:
    """Prompts of a task of `quire.evals`.

    Args:
        material: the model.
        instead_of: the paper's task.
        task: a task of `quire.evals`.
        tokens: most tokens of a prompt with its answer.
        prompts: number of prompts.
    """
    made = prompt_maker_for(material.model)(task, tokens, prompts)
    answers = [encoded_prompt(material.model, prompt.answer) for prompt in made]
    return TaskPrompts(
        name=task,
        tokens=tuple(encoded_prompt(material.model, prompt.prompt) for prompt in made),
        graders=tuple(prompt.grade for prompt in made),
        new_tokens=max(map(len, answers)),
        differences=(
            f"task {task} of quire.evals instead of {instead_of}: no file of --data "
            f"{instead_of.lower()}=FILE",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Outputs of a task under one rule or codec.

    Attributes:
        score: mean grade, 0 to 1.
        texts: outputs.
    """

    score: float
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Cap and schedule of the rules that are compared.

    Attributes:
        cap: cap in tokens.
        every: number of tokens evicted at once, for schedules with repeated evictions.
        when: eviction schedule.
        page_tokens: slots in a page.
    """

    cap: int
    every: int = 16
    when: str = PREFILL_END
    page_tokens: int = 16


def score_rules(
    model: LoadedModel, task: TaskPrompts, rules: Sequence[Rule], budget: Budget
) -> dict[str, Scored]:
    """Score a task under full KV and under eviction rules; rules that agree share one prefill.

    Args:
        model: evaluated model.
        task: prompts.
        rules: rules without caps.
        budget: cap and schedule of all rules.

    Returns:
        Results by the text of the rule, and of full KV by FULL.
    """
    kv = KVConfig(
        memory=_memory(model, task),
        page_tokens=budget.page_tokens,
        evict=FULL,
        evict_allow="; ".join(dict.fromkeys(rule.text for rule in rules)),
    )
    llm = LLM(model, kv=kv, schedule=ScheduleConfig(max_num_seqs=_ROWS))
    found = {FULL: _score(llm, task, FULL)}
    for rule in rules:
        evict = rule.evict(budget.cap, budget.every, budget.when)
        found[rule.text] = _score(llm, task, evict)
    return found


def score_codecs(model: LoadedModel, task: TaskPrompts, codecs: Sequence[str]) -> dict[str, Scored]:
    """Score a task with the KV in each codec, and in plain KV."""
    found = {}
    for codec in dict.fromkeys((PLAIN, *codecs)):
        kv = KVConfig(memory=_memory(model, task), page_tokens=32, codec=codec)
        llm = LLM(model, kv=kv, schedule=ScheduleConfig(max_num_seqs=_ROWS))
        found[codec] = _score(llm, task, None)
    return found


def _score(llm: LLM, task: TaskPrompts, rule: str | None) -> Scored:
    options = SamplingParams(max_tokens=task.new_tokens, temperature=0.0)
    chosen = {} if rule is None else {"evict": rule}
    answers = llm.generate(list(task.tokens), options, **chosen)  # type: ignore[arg-type]
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise InvariantError(f"expected no failed request in a benchmark, got: {failed}")
    texts = tuple(answer.text for answer in answers)
    return Scored(score=task.score(texts), texts=texts)


def _memory(model: LoadedModel, task: TaskPrompts) -> int:
    longest = max(map(len, task.tokens)) + task.new_tokens
    row_bytes = model.spec.kv_bytes(longest, model.decoder.dtype.itemsize)
    cached = min(int(_CACHED_OVER_KV * row_bytes) * len(task.tokens), _MAX_CACHED_BYTES)
    return 2 * _ROWS * row_bytes + cached + (8 << 20)
