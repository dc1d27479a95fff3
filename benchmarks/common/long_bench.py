"""Prompts and scores of the English LongBench data sets, from their files of examples.

question answering     token F1 with the best of the answers
summaries              ROUGE-L with the best of the answers
trec                   1 for the right class
triviaqa               token F1; samsum: ROUGE-L; both with shots in the context
passage_count          fraction of the output's numbers that equal the answer
passage_retrieval_en   fraction of the output's paragraph numbers that equal the answer
repobench-p            similarity of the first line of code

A record has LongBench's fields ("context", "input", "answers", "all_classes"), or a whole prompt
("origin_prompt", "gold"). Quire ships no examples: the data sets have their own licences.

Source: Bai et al. 2024 (LongBench), section 3. Differs from it: the wording of the prompts is
Quire's; code is compared by `difflib` instead of `fuzzywuzzy`.
"""

import ast
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from benchmarks.common.rouge import rouge_l
from quire.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Record = Mapping[str, Any]
Score = Callable[[str, str, Sequence[str]], float]
"""Maps (text, reference, all classes) to a score from 0 to 1."""


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and repeated spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(output: str, reference: str) -> float:
    """F1 of the normalized words (SQuAD)."""
    words, wanted = normalized(output).split(), normalized(reference).split()
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def class_found(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the output) if the reference is one of them (LongBench)."""
    named = [one for one in classes if one in output]
    named = [one for one in named if one == reference or one not in reference]
    return 1.0 / len(named) if reference in named else 0.0


def share_of_numbers(output: str, reference: str) -> float:
    """Fraction of the numbers in the output that equal the reference's number (LongBench)."""
    wanted = re.findall(r"\d+", reference)
    found = re.findall(r"\d+", output)
    return sum(one in wanted[:1] for one in found) / len(found) if found else 0.0


def code_similarity(output: str, reference: str) -> float:
    """Similarity of the first line of code that is no comment (LongBench)."""
    lines = output.lstrip("\n").split("\n")
    first = next((one for one in lines if not any(c in one for c in ("`", "#", "//"))), "")
    return SequenceMatcher(None, first, reference).ratio()


@dataclass(frozen=True, slots=True, kw_only=True)
class LongBenchTask:
    """One data set.

    Attributes:
        ask: format of the prompt, with the fields context and input.
        score: scores an output against one reference.
        new_tokens: length of an output.
        first_line: whether only the first line of an output counts.
    """

    ask: str
    score: Score
    new_tokens: int
    first_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LongBenchExample:
    """One prompt with its references.

    Attributes:
        prompt: the whole prompt.
        references: right answers; the best counts.
        classes: names of all classes, for classification.
    """

    prompt: str
    references: tuple[str, ...]
    classes: tuple[str, ...] = ()


def _f1(text: str, reference: str, _classes: Sequence[str]) -> float:
    return word_f1(text, reference)


def _summary(text: str, reference: str, _classes: Sequence[str]) -> float:
    return rouge_l(text, reference)


def _number(text: str, reference: str, _classes: Sequence[str]) -> float:
    return share_of_numbers(text, reference)


def _code(text: str, reference: str, _classes: Sequence[str]) -> float:
    return code_similarity(text, reference)


def _question(new_tokens: int) -> LongBenchTask:
    return LongBenchTask(
        ask="Passages:\n{context}\n\nQuestion: {input}\nShort answer:",
        score=_f1,
        new_tokens=new_tokens,
    )


_REPORT = LongBenchTask(ask="Text:\n{context}\n\nSummary:", score=_summary, new_tokens=512)
TASKS: Mapping[str, LongBenchTask] = MappingProxyType(
    {
        "narrativeqa": _question(128),
        "qasper": _question(128),
        "multifieldqa_en": _question(64),
        "hotpotqa": _question(32),
        "2wikimqa": _question(32),
        "musique": _question(32),
        "gov_report": _REPORT,
        "qmsum": LongBenchTask(
            ask="Meeting:\n{context}\n\nQuery: {input}\nAnswer:", score=_summary, new_tokens=512
        ),
        "multi_news": _REPORT,
        "trec": LongBenchTask(
            ask="{context}\n{input}", score=class_found, new_tokens=64, first_line=True
        ),
        "triviaqa": LongBenchTask(
            ask="{context}\n\n{input}", score=_f1, new_tokens=32, first_line=True
        ),
        "samsum": LongBenchTask(
            ask="{context}\n\n{input}", score=_summary, new_tokens=128, first_line=True
        ),
        "passage_count": LongBenchTask(
            ask="{context}\n\nThe number of different paragraphs:",
            score=_number,
            new_tokens=32,
        ),
        "passage_retrieval_en": LongBenchTask(
            ask="{context}\n\nAbstract: {input}\nThe abstract is from:",
            score=_number,
            new_tokens=32,
        ),
        "repobench-p": LongBenchTask(ask="{context}{input}", score=_code, new_tokens=64),
    }
)
"""In the order of the paper's columns."""


def example_of(name: str, record: Record) -> LongBenchExample:
    """The prompt and the references of a record.

    Raises:
        ConfigError: a field is missing.
    """
    try:
        if "origin_prompt" in record:
            return LongBenchExample(
                prompt=record["origin_prompt"], references=tuple(map(str, _listed(record["gold"])))
            )
        fields = {"context": record["context"], "input": record.get("input", "")}
        return LongBenchExample(
            prompt=TASKS[name].ask.format(**fields),
            references=tuple(map(str, _listed(record["answers"]))),
            classes=tuple(map(str, _listed(record.get("all_classes")))),
        )
    except (KeyError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"an example of {name} lacks LongBench's fields context and answers, or a readable "
            f"origin_prompt and gold: {error}"
        ) from error


def _listed(value: Any) -> Sequence[Any]:
    """A list, also if it is stored as text; None is an empty list."""
    found = ast.literal_eval(value) if isinstance(value, str) else value
    return found or ()


def grade(name: str, example: LongBenchExample, text: str) -> float:
    """Score an output; the best reference counts."""
    task = TASKS[name]
    shown = text.lstrip("\n").split("\n")[0] if task.first_line else text
    scores = (task.score(shown, one, example.classes) for one in example.references)
    return max(scores, default=0.0)
