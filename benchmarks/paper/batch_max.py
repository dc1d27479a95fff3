"""Paper 000: Batch-Max (Metel et al. 2025), Tables 1 and 2.

The protocol is `benchmarks.batch_max.paper`. The KV memory holds as many rows of full KV as ran
with decode-only eviction in the paper, so that the same batches run out of memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.batch_max.arms import ED, FKV
from benchmarks.batch_max.judged import Encoded
from benchmarks.batch_max.paper import (
    NEAR,
    PaperConfig,
    PaperProtocol,
    PaperRow,
    judged_arm,
    smallest_cap,
)
from benchmarks.common.graded_prompts import GradedPrompt
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values, no_values
from benchmarks.paper.material import Material, fewer
from benchmarks.paper.scores import (
    STAND_INS,
    TaskPrompts,
    few_shot_prompts,
    has_examples,
    stand_in_prompts,
)
from quire.config.kv_config import KVConfig

COLUMNS = ("b", "cap", "score (ROUGE-2 or accuracy)", "tokens/s")
TASKS = ("cnndm", "narrativeqa", "gsm8k")
_OOM, _ED, _ED_65 = "ED, out of memory", "ED, cap 2", "ED, cap 65"
_FKV, _ABOVE, _NEAR = "FKV", "BM, at least FKV's score", "BM, near FKV's score"
_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOf:
    """One of the two tables.

    Attributes:
        model: name of the model's shape.
        machines: the paper's machine by task.
        rows: most rows of decode-only eviction by task, which set the KV memory.
    """

    model: str
    machines: Mapping[str, str]
    rows: Mapping[str, int]


_TITANS = "4 NVIDIA TITAN V (12 GB)"
_V100S = "4 NVIDIA V100 (32 GB)"
TABLE_1 = TableOf(
    model="llama-2-13b",
    machines={"cnndm": _V100S, "narrativeqa": _V100S, "gsm8k": "2 NVIDIA V100 (32 GB)"},
    rows={"cnndm": 4, "narrativeqa": 4, "gsm8k": 3},
)
TABLE_2 = TableOf(
    model="phi-3.5-mini", machines=dict.fromkeys(TASKS, _TITANS), rows=dict.fromkeys(TASKS, 2)
)

PRINTED_1: Mapping[str, Mapping[str, Values]] = {
    "cnndm": {
        _OOM: (5, 2, None, None),
        _ED: (4, 2, 0.000, 42.0),
        _ED_65: (4, 65, 0.003, 41.5),
        _FKV: (4, None, 0.145, 30.3),
        _ABOVE: (32, 1024, 0.146, 73.8),
        _NEAR: (40, 896, 0.142, 80.3),
    },
    "narrativeqa": {
        _OOM: (5, 2, None, None),
        _ED: (4, 2, 0.000, 40.0),
        _ED_65: (4, 65, 0.001, 39.3),
        _FKV: (4, None, 0.312, 26.4),
        _ABOVE: (15, 1792, 0.314, 43.3),
        _NEAR: (16, 1728, 0.310, 46.2),
    },
    "gsm8k": {
        _OOM: (4, 2, None, None),
        _ED: (3, 2, 0.000, 30.3),
        _ED_65: (3, 65, 0.000, 30.1),
        _FKV: (3, None, 0.340, 22.9),
        _ABOVE: (8, 1536, 0.341, 39.3),
        _NEAR: (10, 1408, 0.327, 43.7),
    },
}
PRINTED_2: Mapping[str, Mapping[str, Values]] = {
    "cnndm": {
        _OOM: (3, 2, None, None),
        _ED: (2, 2, 0.001, 29.0),
        _FKV: (2, None, 0.153, 27.0),
        _NEAR: (5, 2176, 0.148, 36.3),
    },
    "narrativeqa": {
        _OOM: (3, 2, None, None),
        _ED: (2, 2, 0.000, 28.0),
        _FKV: (2, None, 0.360, 26.5),
        _NEAR: (6, 1984, 0.351, 37.4),
    },
    "gsm8k": {
        _OOM: (3, 2, None, None),
        _ED: (2, 2, 0.000, 28.4),
        _FKV: (2, None, 0.783, 27.1),
        _NEAR: (8, 1664, 0.774, 43.8),
    },
}


def _printed(by_task: Mapping[str, Mapping[str, Values]]) -> dict[str, Values]:
    return {
        f"{task}: {label}": values
        for task, rows in by_task.items()
        for label, values in rows.items()
    }


def _config(material: Material, task: str, samples: int) -> PaperConfig:
    lengths = {"input_tokens": 256, "new_tokens": 32, "every": 16, "step": 32}
    sizes = lengths if material.quick else {}
    return PaperConfig(model=material.model_name, task=task, samples=samples, **sizes)


def _prompts(material: Material, task: str, config: PaperConfig) -> TaskPrompts:
    if has_examples(material, task):
        return few_shot_prompts(
            material,
            task,
            tokens=config.input_tokens,
            prompts=config.samples,
            new_tokens=config.new_tokens,
        )
    return stand_in_prompts(
        material, task, STAND_INS[0], tokens=config.input_tokens, prompts=config.samples
    )


def _measure(material: Material, table: TableOf) -> Measured:
    found: dict[str, Ours] = {}
    for task in TASKS:
        found |= {f"{task}: {label}": ours for label, ours in _rows(material, table, task).items()}
    return Measured(rows=found)


def _rows(material: Material, table: TableOf, task: str) -> dict[str, Ours]:
    config = _config(material, task, material.count(960, 12))
    prompts = _prompts(material, task, config)
    config = _config(material, task, len(prompts.tokens))
    rows = PaperProtocol(
        material.model, _memory(material, table.rows[task], config), config, _encoded(prompts)
    ).run()
    differences = material.differences(
        table.model,
        table.machines[task],
        (
            fewer(config.samples, 960, "samples"),
            fewer(config.input_tokens, 3_584, "prompt tokens at most"),
            fewer(config.new_tokens, 512, "new tokens"),
            *prompts.differences,
        ),
    )
    return _labelled(rows, differences)


def _encoded(prompts: TaskPrompts) -> list[Encoded]:
    return [
        Encoded(tokens=tuple(ids), graded=GradedPrompt(prompt="", grade=grade))
        for ids, grade in zip(prompts.tokens, prompts.graders, strict=True)
    ]


def _memory(material: Material, rows: int, config: PaperConfig) -> KVConfig:
    """KV memory for the paper's rows of full KV, in whole pages."""
    tokens = config.input_tokens + config.new_tokens + _PAGE_TOKENS
    spec, value_bytes = material.model.spec, material.model.decoder.dtype.itemsize
    return KVConfig(memory=rows * spec.kv_bytes(tokens, value_bytes), page_tokens=_PAGE_TOKENS)


def _labelled(rows: Sequence[PaperRow], differences: tuple[str, ...]) -> dict[str, Ours]:
    full = judged_arm(rows, FKV).score
    chosen = {
        _OOM: next((row for row in rows if row.judged is None), None),
        _ED: next(row for row in rows if row.arm == ED and row.judged),
        _ED_65: next(row for row in rows if row.arm.startswith("ed_") and row.arm != ED),
        _FKV: next(row for row in rows if row.arm == FKV),
        _ABOVE: smallest_cap(rows, full),
        _NEAR: smallest_cap(rows, NEAR * full),
    }
    return {label: _ours(label, row, differences) for label, row in chosen.items()}


def _ours(label: str, row: PaperRow | None, differences: tuple[str, ...]) -> Ours:
    if row is None:
        return no_values(
            "all samples fit in memory together" if label == _OOM else "no tried cap reaches it"
        )
    cap = row.cap or (int(row.arm.split("_")[1]) if row.arm.startswith("ed_") else None)
    score = row.judged.score if row.judged else None
    rate = row.judged.tokens_per_s if row.judged else None
    return Ours(values=(row.batch, cap, score, rate), differences=differences)


_REASON = (
    "scores, caps and batches need the model and files of examples; tokens/s are of the machine "
    "that runs it"
)
ITEMS = (
    Item(
        id="table-1",
        title="Table 1: ED, FKV and BM with Llama-2-13b-chat",
        setting="Llama-2-13b-chat, 960 samples, prompts up to 3,584 tokens, 512 new, p = 64",
        columns=COLUMNS,
        printed=_printed(PRINTED_1),
        measure=lambda material: _measure(material, TABLE_1),
        status=SCALED,
        reason=_REASON,
    ),
    Item(
        id="table-2",
        title="Table 2: ED, FKV and BM with Phi-3.5-mini-instruct",
        setting="Phi-3.5-mini-instruct, 960 samples, prompts up to 3,584 tokens, 512 new, p = 64",
        columns=COLUMNS,
        printed=_printed(PRINTED_2),
        measure=lambda material: _measure(material, TABLE_2),
        status=SCALED,
        reason=_REASON,
    ),
)
