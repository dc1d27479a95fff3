"""Paper 002: Tables I and II and Figures 6 and 8 of KVCrush (Jha et al. 2025)."""

import statistics
from collections.abc import Mapping
from importlib.metadata import version

from benchmarks.kvcrush.config import OverheadConfig
from benchmarks.kvcrush.overhead import ALONE, KMEANS, KVCRUSH, measure
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values
from benchmarks.paper.kvcrush_models import (
    LLAMA_2,
    LLAMA_3,
    NAMES,
    PHI,
    SHARES,
    longest_prompt,
    page_budget,
    page_setting,
    paged_h2o,
    paged_kmeans,
    paged_kvcrush,
    rows_by_model,
    setting_differences,
    task_prompts,
)
from benchmarks.paper.material import Material
from benchmarks.paper.scores import FULL, Scored, TaskPrompts, score_rules

# ---- table I -------------------------------------------------------------------------------------

_BASELINES = "FullKV, H2O, SnapKV, PyramidKV"
_SETTINGS: Mapping[str, str] = {
    "LongBench, models": "Mistral-7B-Instruct-v0.2, Meta-Llama-3-8B-Instruct",
    "LongBench, baselines": _BASELINES,
    "LongBench, paging": "token, chunk",
    "LongBench, budget": "2048",
    "LongBench, partition": "25 % KVCrush, 75 % baseline",
    "lm-eval-harness, data sets": "GSM8K, XSUM",
    "lm-eval-harness, models": "Phi-3-mini-4k-instruct, Meta-Llama-3-8B-Instruct, "
    "Llama-2-7b-chat-hf",
    "lm-eval-harness, baselines": "H2O",
    "lm-eval-harness, paging": "pages of 32",
    "lm-eval-harness, budget": "672 = 32 + 512 + 128",
    "lm-eval-harness, partition": "best of 25 % and 75 % KVCrush",
    "PyTorch": "2.4.1+cu121",
}
_LONG_BENCH_CAP = 2_048


def _table_1(material: Material) -> Measured:
    paper = page_setting(material)
    initial, middle, recent = (paper.scaled(n) for n in (paper.initial, paper.middle, paper.recent))
    changed: dict[str, Ours] = {
        "lm-eval-harness, paging": _setting(f"pages of {paper.scaled(paper.page_tokens)}"),
        "lm-eval-harness, budget": _setting(f"{paper.cap} = {initial} + {middle} + {recent}"),
        "PyTorch": _setting(version("torch"), "another version"),
    }
    if longest_prompt(material) < _LONG_BENCH_CAP:
        changed["LongBench, budget"] = _setting("a quarter of the longest prompt")
    for label in ("LongBench, models", "lm-eval-harness, models"):
        changed[label] = _setting(material.model_name, "the model that is given")
    rows = {label: Ours(values=(text,)) for label, text in _SETTINGS.items()}
    return Measured(rows=rows | changed)


def _setting(text: str, difference: str = "caps and pages for shorter prompts") -> Ours:
    same = text in _SETTINGS.values()
    return Ours(values=(text,), differences=() if same else (difference,))


TABLE_1 = Item(
    id="table-1",
    title="Table I: experimental settings",
    setting="settings of this command beside the paper's",
    columns=("setting",),
    printed={label: (text,) for label, text in _SETTINGS.items()},
    measure=_table_1,
    status=SCALED,
    reason="one model per run, another version of PyTorch; caps are scaled for short prompts",
)

# ---- table II ------------------------------------------------------------------------------------

_GSM8K_MODELS = (PHI, LLAMA_3, LLAMA_2)
_METHODS = ("H2O, 512-0", "KVCrush random", "KVCrush mean", "KVCrush alternate")
_ANCHORS = ("random", "mean", "alternating")
_STRICT_MARK = "####"
_GSM8K: Mapping[str, tuple[Values, ...]] = {
    PHI: ((70.7, 79.3), (75.4, 80.9), (75.2, 80.6), (74.6, 80.9)),
    LLAMA_3: ((74.9, 74.7), (76.2, 76.2), (76.5, 76.4), (75.7, 75.6)),
    LLAMA_2: ((20.9, 22.5), (21.1, 22.6), (21.0, 22.9), (21.2, 22.7)),
}


def _table_2(material: Material) -> Measured:
    return Measured(
        rows=rows_by_model(
            material, _GSM8K_MODELS, _METHODS, lambda model: _anchors(material, model)
        )
    )


def _anchors(material: Material, model: str) -> dict[str, Ours]:
    paper, task = page_setting(material), task_prompts(material, "gsm8k")
    share = SHARES[0]  # the paper's 128 + 384
    rules = [paged_h2o(paper), *(paged_kvcrush(paper, share, anchor) for anchor in _ANCHORS)]
    found = score_rules(material.model, task, rules, page_budget(paper))
    differences = material.differences(model, others=setting_differences(paper, task))
    return {
        label: Ours(
            values=(100 * _strict(task, found[rule.text]), 100 * found[rule.text].score),
            differences=differences,
            note=f"full KV: {100 * found[FULL].score:.1f} (flexible)",
        )
        for label, rule in zip(_METHODS, rules, strict=True)
    }


def _strict(task: TaskPrompts, found: Scored) -> float:
    """Score of the outputs that mark their answer."""
    grades = zip(task.graders, found.texts, strict=True)
    needs_mark = task.name == "gsm8k"
    return statistics.mean(
        0.0 if needs_mark and _STRICT_MARK not in text else grade(text) for grade, text in grades
    )


TABLE_2 = Item(
    id="table-2",
    title="Table II: GSM8K accuracy with different anchors",
    setting="512 tokens of the budget, 128 by H2O and 384 by KVCrush, pages of 32",
    columns=("strict %", "flexible %"),
    printed={
        f"{NAMES[model]}: {method}": values
        for model, rows in _GSM8K.items()
        for method, values in zip(_METHODS, rows, strict=True)
    },
    measure=_table_2,
    status=SCALED,
    reason="one model per run; prompts are Quire's wording; needs --data gsm8k=FILE. The printed "
    "fractions of Llama-2 are shown in percent",
)

# ---- figure 6 ------------------------------------------------------------------------------------

_FIGURE_6 = ("H2O", "KVCrush", "KMeans")


def _figure_6(material: Material) -> Measured:
    paper, task = page_setting(material), task_prompts(material, "gsm8k")
    share = SHARES[1]
    rules = [paged_h2o(paper), paged_kvcrush(paper, share), paged_kmeans(paper, share)]
    found = score_rules(material.model, task, rules, page_budget(paper))
    added = _added_latency(material)
    differences = (
        f"{material.model_name} on {material.machine}; the paper does not name the model",
        *(text for text in setting_differences(paper, task) if text),
    )
    rows = {
        label: Ours(
            values=(100 * (found[FULL].score - found[rule.text].score), added[label]),
            differences=differences,
            note="latency: selection, signatures and representatives, over the rest of the run "
            "without the base rule's selection",
        )
        for label, rule in zip(_FIGURE_6, rules, strict=True)
    }
    return Measured(rows=rows)


def _added_latency(material: Material) -> dict[str, float | None]:
    sizes = {"rows": 2, "prompt_tokens": 192, "new_tokens": 32, "cap": 96, "every": 16}
    config = OverheadConfig(**sizes) if material.quick else OverheadConfig()  # type: ignore[arg-type]
    runs = measure(config, model=material.model)
    alone = runs[ALONE]
    added = {"H2O": 0.0}
    for label, name in (("KVCrush", KVCRUSH), ("KMeans", KMEANS)):
        extra_s = runs[name].overhead_s - alone.overhead_s
        added[label] = 100 * extra_s / (runs[name].run_s - extra_s)
    return dict(added)


FIGURE_6 = Item(
    id="figure-6",
    title="Figure 6: accuracy deficit and latency of k-means and KVCrush on GSM8K",
    setting="GSM8K, Xeon Platinum 8470; the text states the overheads",
    columns=("accuracy deficit, points", "added latency %"),
    printed={"H2O": (None, None), "KVCrush": (None, 0.5), "KMeans": (None, 200)},
    measure=_figure_6,
    status=SCALED,
    reason="another machine; the paper prints no accuracies",
)

# ---- figure 8 ------------------------------------------------------------------------------------

_PAGED_MODELS = (PHI, LLAMA_3)
_PAGED_TASKS = ("gsm8k", "xsum")
_PAGED_LABELS = tuple(
    f"{task}, {rule}" for task in _PAGED_TASKS for rule in ("paged H2O", "paged KVCrush")
)


def _figure_8(material: Material) -> Measured:
    return Measured(
        rows=rows_by_model(
            material, _PAGED_MODELS, _PAGED_LABELS, lambda model: _paged(material, model)
        )
    )


def _paged(material: Material, model: str) -> dict[str, Ours]:
    paper, rows = page_setting(material), {}
    for name in _PAGED_TASKS:
        task = task_prompts(material, name)
        h2o = paged_h2o(paper)
        crushing = [paged_kvcrush(paper, share) for share in SHARES]
        found = score_rules(material.model, task, [h2o, *crushing], page_budget(paper))
        differences = material.differences(model, others=setting_differences(paper, task))
        best = max(crushing, key=lambda rule: found[rule.text].score)
        splits = ", ".join(
            f"{share:.0%}: {100 * found[rule.text].score:.1f}"
            for share, rule in zip(SHARES, crushing, strict=True)
        )
        for label, rule, note in (
            ("paged H2O", h2o, ""),
            ("paged KVCrush", best, f"the better split, as in the paper ({splits})"),
        ):
            score, full = found[rule.text].score, found[FULL].score
            rows[f"{name}, {label}"] = Ours(
                values=(100 * score, 100 * (score - full)), differences=differences, note=note
            )
    return rows


FIGURE_8 = Item(
    id="figure-8",
    title="Figure 8: paged H2O and paged KVCrush, change from full KV",
    setting="GSM8K and XSUM, 672 = 32 + 512 + 128 tokens in pages of 32",
    columns=("score %", "change from full KV, points"),
    printed={
        f"{NAMES[model]}: {label}": (None, None)
        for model in _PAGED_MODELS
        for label in _PAGED_LABELS
    },
    measure=_figure_8,
    status=SCALED,
    reason="one model per run; needs --data gsm8k=FILE and xsum=FILE; the paper prints no values",
)
