"""Questions about long documents, in the form of NarrativeQA (Kocisky et al. 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.metrics import best_rouge, require_rouge, word_f1
from quire.evals.suite.readers.records import first_text, records, texts
from quire.sim.traces.reading import Row

ROUGE_L, F1 = "rougeL", "f1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrativeQA(EvalTask):
    """Records with `document`, `question` and `answers`; each a text, or an object with `text`."""

    name: str = "narrativeqa"
    summary: str = "questions about a document, ROUGE-L and F1 (file: document, question, answers)"
    source: str = "JSON lines: document (or story, context), question, and answers"
    metrics: ClassVar[tuple[str, ...]] = (ROUGE_L, F1)

    def check(self) -> None:
        """See `EvalTask`."""
        require_rouge(self.name)

    def samples(self, options: SampleOptions) -> list[Sample]:
        """See `EvalTask`."""
        rows = records(options.file(self.name, self.source), options.count)
        return [_sample(row) for row in rows]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Of several answers the best one counts."""
        return {
            ROUGE_L: best_rouge(output, sample.references)[ROUGE_L],
            F1: max(word_f1(output, one) for one in sample.references),
        }


def _sample(row: Row) -> Sample:
    document = first_text(row, "document", "story", "context")
    question = first_text(row, "question", "input")
    return Sample(
        prompt=(
            f"{document.strip()}\n\nAnswer the question about the text above with a short phrase.\n"
            f"Question: {question.strip()}\nAnswer:"
        ),
        references=texts(row, "answers"),
        max_tokens=64,
        stop=("\n",),
    )
