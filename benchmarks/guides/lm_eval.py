"""Results of lm-evaluation-harness on quire-tiny, as docs/guides/lm-eval.md shows them.

The tasks are those of the page: its program and its files are written to a folder and used. The
first 20 examples run with the class `quire` and with `hf`; all 40 pairs with `quire serve`, with
`hf`, and with `quire serve` and the rule of the page. The last line of output is one JSON object.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.server import served
from benchmarks.guides.code_blocks import code_block
from quire.cli.report import envelope
from quire.models.source import find_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "lm-eval.md"
RULE = "recent:cap=128,sinks=4"
PAIRS = ["quire_pairs", "quire_pairs_choice"]
EXAMPLES = 20
_OPTIONS = ("--dtype", "float32", "--kv-memory", "64MiB")
_PERPLEXITY = """task: quire_perplexity
dataset_path: json
dataset_kwargs:
  data_files: {test: tasks/pairs.jsonl}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list:
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
"""


def main() -> None:
    """Run all evaluations in a temporary folder and print their results."""
    folder = str(find_model("quire-tiny")[0])
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.environ["HF_DATASETS_CACHE"] = str(Path(place) / "cache")
        write_tasks(PAGE.read_text(encoding="utf-8"))
        with contextlib.redirect_stdout(io.StringIO()):
            claims = {**in_process(folder), **with_servers(folder)}
    config = {
        "model": "quire-tiny",
        "tasks": PAIRS,
        "rule": RULE,
        "examples": EXAMPLES,
        "repeats": 1,
    }
    print(json.dumps(envelope("lm-eval guide", claims, {}, config)))


def write_tasks(page: str) -> None:
    """Run the page's program, and write its task files and a perplexity task."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code_block(page, 'python title="make_pairs.py"', PAGE.name), {})
    for name in PAIRS:
        text = code_block(page, f'yaml title="tasks/{name}.yaml"', PAGE.name)
        Path(f"tasks/{name}.yaml").write_text(text, encoding="utf-8")
    Path("tasks/quire_perplexity.yaml").write_text(_PERPLEXITY, encoding="utf-8")


def in_process(folder: str) -> dict[str, float]:
    """Results of both model classes on the first examples, and of `hf` on all pairs."""
    from lm_eval.models.huggingface import HFLM

    from quire.evals.lm_eval import QuireLM

    reference = HFLM(folder, dtype="float32", device="cpu", max_length=2048, batch_size=1)
    engine = QuireLM(folder, dtype="float32", kv_memory="64MiB", max_length=2048)
    tasks = [*PAIRS, "quire_perplexity"]
    return {
        **_named("quire_20", evaluated(tasks, EXAMPLES, model=engine)),
        **_named("hf_20", evaluated(tasks, EXAMPLES, model=reference)),
        **_named("hf_40", evaluated(PAIRS, None, model=reference)),
    }


def with_servers(folder: str) -> dict[str, float]:
    """Results of `local-completions` on all pairs, with full KV and with the rule."""
    found: dict[str, float] = {}
    variants: Mapping[str, tuple[str, ...]] = {"serve_40": (), "rule_40": ("--evict", RULE)}
    for name, options in variants.items():
        options = (*_OPTIONS, "--served-model-name", "quire-tiny", *options)
        with served(options, str(folder)) as server:
            arguments = f"model=quire-tiny,base_url={server.url}/v1/completions,tokenizer={folder}"
            arguments += ",num_concurrent=8,max_length=2048"
            results = evaluated(PAIRS, None, model="local-completions", model_args=arguments)
        found |= _named(name, results)
    return found


def evaluated(tasks: list[str], limit: int | None, **model: Any) -> dict[str, Any]:
    """Results of the harness by task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path="tasks", include_defaults=False)
    results = simple_evaluate(
        tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=100, **model
    )
    found: dict[str, Any] = results["results"]
    return found


def _named(variant: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Numbers named by variant, task and metric, such as hf_40_quire_pairs_exact_match."""
    return {
        f"{variant}_{task}_{metric.removesuffix(',none')}": float(value)
        for task, found in results.items()
        for metric, value in found.items()
        if isinstance(value, int | float)
    }


if __name__ == "__main__":
    main()
