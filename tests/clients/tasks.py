"""Tasks of lm-evaluation-harness with local data: generation, choices and perplexity.

The first two are those of docs/guides/lm-eval.md.
"""

import json
import random
from pathlib import Path

from quire.evals.tasks import make

EXAMPLES = 20
_DATA = "dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {path}}}\ntest_split: test\n"
_PAIRS = (
    _DATA
    + """task: quire_pairs
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\""], max_gen_toks: 24, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
)
_CHOICE = (
    _DATA
    + """task: quire_pairs_choice
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices.index(answer)}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
)
_PERPLEXITY = (
    _DATA
    + """task: quire_perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{prompt}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
"""
)


def write_tasks(folder: Path) -> str:
    """Write the tasks and their data; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in _lines()), encoding="utf-8")
    for name, text in (("pairs", _PAIRS), ("choice", _CHOICE), ("perplexity", _PERPLEXITY)):
        (folder / f"{name}.yaml").write_text(text.format(path=data), encoding="utf-8")
    return str(folder)


def _lines() -> list[dict[str, object]]:
    numbers = random.Random(0)
    lines: list[dict[str, object]] = []
    for seed in range(EXAMPLES):
        task = make("kv", seed=seed, tokens=300, depth=seed % 10 / 10)
        answer = task.queries[0].answer
        wrong = (str(numbers.randrange(10_000, 100_000)) for _ in range(3))
        prompt = "<|doc|>" + task.prompt()
        lines.append({"prompt": prompt, "answer": answer, "choices": sorted([answer, *wrong])})
    return lines
