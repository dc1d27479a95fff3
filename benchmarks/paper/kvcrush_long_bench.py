"""Paper 002: Table III and Figures 5 and 7 of KVCrush on LongBench."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.common import long_bench
from benchmarks.common.result import Table
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.arms import crushed, with_options
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values, no_values
from benchmarks.paper.kvcrush_models import LLAMA_3, MISTRAL, NAMES, rows_by_model
from benchmarks.paper.material import Material, fewer
from benchmarks.paper.scores import (
    FULL,
    STAND_INS,
    Budget,
    TaskPrompts,
    has_examples,
    long_bench_prompts,
    score_rules,
    stand_in_prompts,
)

CAP, SHARE = 2_048, 0.25
DATA_SETS = tuple(long_bench.TASKS)
_AVERAGE = "average"
_PYRAMID = "budget=pyramid"
_CONTEXT, _QUICK_CONTEXT = 31_500, 256
_PROMPTS, _QUICK_PROMPTS = 200, 2
_QUICK_NEW_TOKENS = 16
_MIN_CAP = 64
_CUT_SHARE = 0.25  # cap over the longest prompt, if prompts are shorter than the paper's


def _prompts(material: Material, task: str) -> TaskPrompts:
    count = material.count(_PROMPTS, _QUICK_PROMPTS)
    whole = long_bench.TASKS[task].new_tokens
    new_tokens = min(whole, _QUICK_NEW_TOKENS) if material.quick else whole
    tokens = min(_longest(material), material.model.spec.max_positions - new_tokens)
    made = long_bench_prompts(material, task, tokens=tokens, prompts=count)
    shorter = fewer(new_tokens, whole, "new tokens")
    differences = (*made.differences, shorter) if shorter else made.differences
    return replace(made, new_tokens=new_tokens, differences=differences)


def _longest(material: Material) -> int:
    return material.context(_CONTEXT, _QUICK_CONTEXT)


def _stand_ins(material: Material, instead_of: str) -> list[TaskPrompts]:
    names = STAND_INS[:2] if material.quick else STAND_INS
    count = material.count(_PROMPTS, _QUICK_PROMPTS)
    tokens = min(_longest(material), 4_000)
    return [
        stand_in_prompts(material, instead_of, name, tokens=tokens, prompts=count) for name in names
    ]


def _budget(tasks: Iterable[TaskPrompts]) -> Budget:
    """The paper's cap, or a quarter of the longest prompt if that is shorter than the cap."""
    longest = max(len(ids) for task in tasks for ids in task.tokens)
    return Budget(cap=CAP if longest > CAP else max(_MIN_CAP, int(_CUT_SHARE * longest)))


def _bases(material: Material) -> dict[str, tuple[Rule, str]]:
    """Base rules with the options that also hold for KVCrush around them, by column."""
    window = ":window=8" if material.quick else ""
    snap = Rule(f"snapkv{window}")
    return {"H2O": (Rule("h2o"), ""), "SnapKV": (snap, ""), "PyramidKV": (snap, _PYRAMID)}


def _alone(base: Rule, options: str) -> Rule:
    return with_options(base, options)


def _crushed(base: Rule, options: str, share: float = SHARE) -> Rule:
    return crushed(base, share, options)


def _differences(
    material: Material, model: str, budget: Budget, tasks: Sequence[TaskPrompts]
) -> tuple[str, ...]:
    own = dict.fromkeys(text for task in tasks for text in task.differences)
    count = max(len(task.tokens) for task in tasks)
    return material.differences(
        model,
        others=(
            fewer(budget.cap, CAP, "tokens of budget"),
            f"at most {count} prompts of a data set",
            *own,
        ),
    )


# ---- table III -----------------------------------------------------------------------------------

COLUMNS = ("FullKV", "H2O", "SnapKV", "PyramidKV", "KVCrush*", "compression")
_COMPRESSION = (9.0, 1.8, 2.2, 4.5, 2.4, 5.5, 4.3, 5.2, 1.0, 2.5, 4.0, 3.1, 5.4, 4.5, 2.1, 4)
_SCORES: Mapping[str, tuple[tuple[float, ...], ...]] = {
    MISTRAL: (
        (
            *(26.85, 33.06, 49.44, 43.02, 27.33, 18.78, 32.87, 24.21),
            *(27.05, 71.00, 86.23, 42.90, 2.75, 86.98, 54.41, 41.79),
        ),
        (
            *(25.10, 30.67, 48.29, 40.89, 25.98, 15.57, 28.06, 23.48),
            *(26.78, 60.50, 86.33, 42.48, 2.57, 82.73, 52.92, 39.49),
        ),
        (
            *(26.15, 32.38, 49.54, 41.66, 27.54, 19.43, 29.58, 23.83),
            *(26.70, 71.00, 86.31, 43.07, 2.89, 85.89, 53.87, 41.32),
        ),
        (
            *(25.82, 31.67, 49.20, 41.19, 27.01, 19.37, 29.15, 23.89),
            *(26.72, 71.00, 86.28, 43.24, 2.73, 85.06, 53.57, 41.06),
        ),
        (
            *(26.20, 32.09, 49.86, 41.86, 28.33, 18.85, 29.62, 24.22),
            *(27.05, 71.00, 86.26, 43.01, 2.71, 86.06, 54.13, 41.42),
        ),
    ),
    LLAMA_3: (
        (
            *(25.56, 31.95, 39.71, 43.56, 35.63, 21.18, 28.58, 23.27),
            *(26.75, 74.00, 90.48, 42.30, 4.80, 69.25, 53.92, 40.73),
        ),
        (
            *(25.42, 26.43, 38.87, 42.82, 32.91, 20.02, 25.09, 23.26),
            *(26.11, 58.50, 90.56, 41.57, 5.20, 69.50, 54.10, 38.69),
        ),
        (
            *(25.70, 29.96, 38.93, 43.90, 35.05, 20.44, 26.89, 23.43),
            *(26.17, 74.00, 90.56, 41.96, 5.54, 69.25, 56.16, 40.53),
        ),
        (
            *(25.53, 29.89, 38.67, 43.90, 35.04, 21.60, 26.80, 23.51),
            *(26.37, 73.50, 90.56, 42.21, 5.08, 69.25, 55.36, 40.48),
        ),
        (
            *(25.62, 29.48, 39.56, 44.05, 36.20, 21.62, 26.24, 23.28),
            *(26.52, 74.00, 90.56, 42.24, 5.83, 69.50, 54.49, 40.61),
        ),
    ),
}
_LABELS = (*DATA_SETS, _AVERAGE)


def _printed() -> dict[str, Values]:
    found: dict[str, Values] = {}
    for model, methods in _SCORES.items():
        for label, *values in zip(_LABELS, *methods, _COMPRESSION, strict=True):
            found[f"{NAMES[model]}: {label}"] = tuple(values)
    return found


def _table_3(material: Material) -> Measured:
    return Measured(
        rows=rows_by_model(
            material, (MISTRAL, LLAMA_3), _LABELS, lambda model: _data_sets(material, model)
        )
    )


def _data_sets(material: Material, model: str) -> dict[str, Ours]:
    given = [name for name in DATA_SETS if has_examples(material, name)]
    tasks = [_prompts(material, name) for name in given] or _stand_ins(material, "LongBench")
    budget, bases = _budget(tasks), _bases(material)
    rules = [form(*base) for base in bases.values() for form in (_alone, _crushed)]
    scores = {
        task.name: {
            rule: 100 * found.score
            for rule, found in score_rules(material.model, task, rules, budget).items()
        }
        for task in tasks
    }
    means = {
        rule: statistics.mean(by_rule[rule] for by_rule in scores.values())
        for rule in (FULL, *(rule.text for rule in rules))
    }
    best = max(bases.values(), key=lambda base: means[_alone(*base).text])
    shown = [FULL, *(_alone(*base).text for base in bases.values()), _crushed(*best).text]
    differences = _differences(material, model, budget, tasks)
    note = f"KVCrush* has the best base of this run, {_alone(*best).text}"
    rows = {name: no_values(f"name its examples: --data {name}=FILE") for name in DATA_SETS}
    for task in tasks:
        if task.name in given:
            rows[task.name] = Ours(
                values=(*(scores[task.name][rule] for rule in shown), _compression(task, budget)),
                differences=differences,
                note=note,
            )
    compression = statistics.mean(_compression(task, budget) for task in tasks)
    rows[_AVERAGE] = Ours(
        values=(*(means[rule] for rule in shown), compression),
        differences=(*differences, f"mean of {', '.join(scores)}"),
        note=note,
    )
    return rows


def _compression(task: TaskPrompts, budget: Budget) -> float:
    """Mean prompt length over the cap, at least 1."""
    return max(1.0, statistics.mean(map(len, task.tokens)) / budget.cap)


TABLE_3 = Item(
    id="table-3",
    title="Table III: LongBench scores at a budget of 2,048 tokens",
    setting="15 data sets, 25 % of the budget for representatives",
    columns=COLUMNS,
    printed=_printed(),
    measure=_table_3,
    status=SCALED,
    reason="one model per run; needs the files of the data sets; prompts are Quire's wording",
)

# ---- figure 5 ------------------------------------------------------------------------------------

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_STORIES, _OTHERS = "narrativeqa", "other workloads"


def _figure_5(material: Material) -> Measured:
    given = [name for name in DATA_SETS if has_examples(material, name)]
    tasks = [_prompts(material, name) for name in given] or _stand_ins(material, "LongBench")
    budget = _budget(tasks)
    shares = (0.0, 0.25, 0.75) if material.quick else _SHARES
    rules = [crushed(Rule("h2o"), share) for share in shares]
    table_rows: list[Values] = []
    best: dict[str, float] = {}
    for task in tasks:
        found = score_rules(material.model, task, rules, budget)
        scores = [100 * found[rule.text].score for rule in rules]
        table_rows.append((task.name, *scores))
        best[task.name] = 100 * shares[scores.index(max(scores))]
    differences = _differences(material, "", budget, tasks)
    differences = (f"{material.model_name}; the paper does not name the model", *differences)
    others = [share for name, share in best.items() if name != _STORIES]
    rows = {
        _STORIES: _range([best[_STORIES]], differences)
        if _STORIES in best
        else no_values("name its examples: --data narrativeqa=FILE"),
        _OTHERS: _range(others, differences) if others else no_values("no other data set is given"),
    }
    table = Table(
        name="shares",
        caption=f"Scores in percent by share of the budget for representatives, cap {budget.cap}.",
        columns=("task", *(f"{share:.0%}" for share in shares)),
        rows=tuple(table_rows),
    )
    return Measured(rows=rows, tables=(table,))


def _range(best: Sequence[float], differences: tuple[str, ...]) -> Ours:
    return Ours(
        values=(min(best), max(best)),
        differences=differences,
        note="smallest of the best shares",
    )


FIGURE_5 = Item(
    id="figure-5",
    title="Figure 5: share of the budget for KVCrush with the best accuracy",
    setting="LongBench; the text states the ranges",
    columns=("best share %, low", "best share %, high"),
    printed={_STORIES: (90, 90), _OTHERS: (20, 50)},
    measure=_figure_5,
    status=SCALED,
    reason="needs the files of the data sets; the paper prints no values besides the ranges",
)

# ---- figure 7 ------------------------------------------------------------------------------------

_TOKEN, _CHUNK = "token", "chunk"
_CHUNK_TOKENS, _SMALL_CHUNK_TOKENS, _LARGE_CAP = 8, 4, 256
_FIGURE_7 = tuple(
    f"{granularity}: {base}" for granularity in (_TOKEN, _CHUNK) for base in COLUMNS[1:4]
)


def _figure_7(material: Material) -> Measured:
    name = "2wikimqa"
    task = (
        _prompts(material, name) if has_examples(material, name) else _stand_ins(material, name)[0]
    )
    budget, rows = _budget([task]), {}
    chunk_tokens = _CHUNK_TOKENS if budget.cap >= _LARGE_CAP else _SMALL_CHUNK_TOKENS
    differences = (
        f"{material.model_name}; the paper does not name the model",
        *_differences(material, "", budget, [task]),
        fewer(chunk_tokens, _CHUNK_TOKENS, "tokens of a chunk"),
    )
    differences = tuple(text for text in differences if text)
    chunks = f"granularity=chunk,chunk_tokens={chunk_tokens}"
    for granularity, options in ((_TOKEN, ""), (_CHUNK, chunks)):
        pairs = {
            label: tuple(with_options(form(*base), options) for form in (_alone, _crushed))
            for label, base in _bases(material).items()
        }
        rules = [rule for pair in pairs.values() for rule in pair]
        found = score_rules(material.model, task, rules, budget)
        for label, pair in pairs.items():
            alone, crushing = (100 * found[rule.text].score for rule in pair)
            rows[f"{granularity}: {label}"] = Ours(
                values=(alone, crushing, crushing - alone), differences=differences
            )
    return Measured(rows=rows)


FIGURE_7 = Item(
    id="figure-7",
    title="Figure 7: KVCrush with other eviction rules on 2wikimqa, by token and by chunk",
    setting="2wikimqa, chunks of 8 tokens",
    columns=("rule alone %", "with KVCrush %", "gain, points"),
    printed=dict.fromkeys(_FIGURE_7, (None, None, None)),
    measure=_figure_7,
    status=SCALED,
    reason="needs --data 2wikimqa=FILE; the paper prints no values",
)
