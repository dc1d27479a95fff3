"""Paper 002 (KVCrush): its models, its page-level setting, and rows of models that did not run."""

from collections.abc import Callable, Iterable

from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.arms import crushed, one_set, paper_base, with_options
from benchmarks.kvcrush.config import PaperConfig
from benchmarks.paper.item import Ours, no_values
from benchmarks.paper.material import Material, other_model_row
from benchmarks.paper.scores import (
    STAND_INS,
    Budget,
    TaskPrompts,
    few_shot_prompts,
    has_examples,
    stand_in_prompts,
)
from quire.layout.eviction import PREFILL_AND_DECODE

PHI, LLAMA_3, LLAMA_2, MISTRAL = "phi-3-mini", "llama-3-8b", "llama-2-7b", "mistral-7b"
NAMES = {
    PHI: "Phi-3-mini-4k-instruct",
    LLAMA_3: "Meta-Llama-3-8B-Instruct",
    LLAMA_2: "Llama-2-7b-chat-hf",
    MISTRAL: "Mistral-7B-Instruct-v0.2",
}
PAGES = "granularity=page"
SHARES = (0.75, 0.25)
"""Fractions of the budget for representatives: the paper's splits 128 + 384 and 384 + 128."""

_TOKENS, _QUICK_TOKENS = 2_048, 256


def rows_by_model(
    material: Material,
    models: tuple[str, ...],
    labels: Iterable[str],
    measure: Callable[[str], dict[str, Ours]],
) -> dict[str, Ours]:
    """Rows of every model of a table; only the rows of one model have values.

    Args:
        material: the model.
        models: the table's models; the first is used if the loaded one is none of them.
        labels: labels of each model's rows.
        measure: measures the rows of a model, by label.
    """
    own = material.own_row(models)
    found: dict[str, Ours] = {}
    for model in models:
        if model == own:
            rows = measure(model)
        else:
            reason = other_model_row(material, NAMES[model])
            rows = {label: no_values(reason) for label in labels}
        found |= {f"{NAMES[model]}: {label}": ours for label, ours in rows.items()}
    return found


def page_setting(material: Material) -> PaperConfig:
    """The setting of the paper's table I, divided for prompts that are shorter."""
    return PaperConfig.for_prompts(longest_prompt(material))


def longest_prompt(material: Material) -> int:
    """Longest few-shot prompt in tokens."""
    return material.context(_TOKENS, _QUICK_TOKENS)


def page_budget(paper: PaperConfig) -> Budget:
    """Cap of the page-level setting."""
    page_tokens = paper.scaled(paper.page_tokens)
    return Budget(
        cap=paper.cap, every=page_tokens, when=PREFILL_AND_DECODE, page_tokens=page_tokens
    )


def paged_h2o(paper: PaperConfig) -> Rule:
    """H2O by pages with one retained set per layer, as in the paper."""
    return one_set(paper_base(paper), PAGES)


def paged_kvcrush(paper: PaperConfig, share: float, anchor: str = "mean") -> Rule:
    """KVCrush by pages."""
    return crushed(paper_base(paper), share, f"anchor={anchor}", PAGES)


def paged_kmeans(paper: PaperConfig, share: float) -> Rule:
    """Clusters by k-means instead of KVCrush's slices."""
    return with_options(Rule(f"kmeans:base=({paper_base(paper).text})"), f"share={share:g}", PAGES)


def task_prompts(material: Material, task: str) -> TaskPrompts:
    """Few-shot prompts of a task, or stand-in prompts without a file."""
    tokens, count = longest_prompt(material), material.count(200, 3)
    new_tokens = 24 if material.quick else 256
    if has_examples(material, task):
        room = min(tokens, material.model.spec.max_positions - new_tokens)
        return few_shot_prompts(material, task, tokens=room, prompts=count, new_tokens=new_tokens)
    return stand_in_prompts(material, task, STAND_INS[0], tokens=tokens, prompts=count)


def setting_differences(paper: PaperConfig, task: TaskPrompts) -> tuple[str, ...]:
    """Differences of the caps and of the prompts."""
    scaled = f"caps and pages divided by {paper.divisor}" if paper.divisor > 1 else ""
    return (scaled, f"{len(task.tokens)} prompts", *task.differences)
