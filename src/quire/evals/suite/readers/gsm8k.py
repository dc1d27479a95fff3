"""GSM8K (Cobbe et al. 2021): word problems with worked answers before the question.

The last number of the output is compared with the number after `####`. The examples are the first
records of `train.jsonl` in the same folder; without this file, the first records of the file
itself, which are then no questions.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.metrics import last_number
from quire.evals.suite.readers.records import records
from quire.sim.traces.reading import Row

ACCURACY = "accuracy"
SHOTS = 8
TRAIN = "train.jsonl"
_CALCULATION = re.compile(r"<<[^>]*>>")
_MARK = "####"


@dataclass(frozen=True, slots=True, kw_only=True)
class GSM8K(EvalTask):
    """Records with `question` and `answer`."""

    name: str = "gsm8k"
    summary: str = "word problems, 8 worked examples; last number of the output (file: GSM8K)"
    source: str = "GSM8K's test.jsonl: question and answer on each line"
    metrics: ClassVar[tuple[str, ...]] = (ACCURACY,)

    def files(self, path: Path) -> list[Path]:
        """See `EvalTask`."""
        train = path.with_name(TRAIN)
        return [path, train] if train.exists() and train != path else [path]

    def samples(self, options: SampleOptions) -> list[Sample]:
        """See `EvalTask`."""
        path = options.file(self.name, self.source)
        shots = SHOTS if options.shots is None else options.shots
        _, *train = self.files(path)
        if train:
            examples, rows = records(train[0], max(1, shots))[:shots], records(path, options.count)
        else:
            listed = records(path, options.count + shots)
            examples, rows = listed[:shots], listed[shots:]
        start = "".join(f"{_question(row)} {_worked(row)}\n\n" for row in examples)
        return [_sample(start, row) for row in rows]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """1 if the last number is that of the reference."""
        return {ACCURACY: float(last_number(output) == sample.references[0])}


def _sample(start: str, row: Row) -> Sample:
    answer = row.text("answer")
    if _MARK not in answer:
        raise row.error(f"an answer with {_MARK} and a number", answer[-40:])
    reference = last_number(answer.rpartition(_MARK)[2])
    prompt = start + _question(row)
    return Sample(prompt=prompt, references=(reference,), max_tokens=256, stop=("\n\n", "\nQ:"))


def _question(row: Row) -> str:
    return f"Q: {row.text('question')}\nA:"


def _worked(row: Row) -> str:
    steps, _, number = _CALCULATION.sub("", row.text("answer")).rpartition(_MARK)
    return f"{steps.strip()} The answer is {number.strip()}."
