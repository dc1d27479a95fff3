"""Summaries of news articles, scored by ROUGE: XSum and CNN/DailyMail."""

from dataclasses import dataclass
from typing import ClassVar

from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.metrics import ROUGE, best_rouge, require_rouge
from quire.evals.suite.readers.records import first_text, records
from quire.sim.traces.reading import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries(EvalTask):
    """Articles with one summary each.

    Attributes:
        name, summary, source: see `EvalTask`.
        documents: fields that may hold the article.
        references: fields that may hold the summary.
        request: what the prompt asks for.
        max_tokens: output tokens.
    """

    name: str
    summary: str
    source: str
    documents: tuple[str, ...]
    references: tuple[str, ...]
    request: str
    max_tokens: int
    metrics: ClassVar[tuple[str, ...]] = ROUGE

    def check(self) -> None:
        """See `EvalTask`."""
        require_rouge(self.name)

    def samples(self, options: SampleOptions) -> list[Sample]:
        """See `EvalTask`; the first records of the file are the examples, if any."""
        shots = options.shots or 0
        rows = records(options.file(self.name, self.source), options.count + shots)
        start = "".join(
            f"{self._question(row)} {first_text(row, *self.references)}\n\n" for row in rows[:shots]
        )
        return [self._sample(start, row) for row in rows[shots:]]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """F1 of ROUGE-L, ROUGE-1 and ROUGE-2."""
        return best_rouge(output, sample.references)

    def _sample(self, start: str, row: Row) -> Sample:
        return Sample(
            prompt=start + self._question(row),
            references=(first_text(row, *self.references),),
            max_tokens=self.max_tokens,
            stop=("\n\n", "\nArticle:"),
        )

    def _question(self, row: Row) -> str:
        return f"Article: {first_text(row, *self.documents)}\n\n{self.request}\nSummary:"


XSUM = Summaries(
    name="xsum",
    summary="summary of a news article in one sentence, ROUGE (file: XSum)",
    source="XSum as JSON lines: document and summary",
    documents=("document",),
    references=("summary",),
    request="Summarize the article in one sentence.",
    max_tokens=64,
)
CNN_DM = Summaries(
    name="cnn_dm",
    summary="summary of a news article in three sentences, ROUGE (file: CNN/DailyMail)",
    source="CNN/DailyMail as JSON lines or one JSON list: article and highlights",
    documents=("article",),
    references=("highlights",),
    request="Summarize the article in three sentences.",
    max_tokens=128,
)
