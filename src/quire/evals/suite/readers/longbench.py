"""LongBench (Bai et al. 2023): English tasks and code, with the prompts of its own config files.

Two forms of files are read:

    LongBench       lines with context, input, answers, dataset, all_classes. The prompt and the
                    output length are those of `dataset2prompt.json` and `dataset2maxlen.json`, in
                    the folder of the file or in its subfolder `config`
    MiniLongBench   one object of records with origin_prompt and gold; the name of the file is that
                    of the data set

Differs from the paper: ROUGE-L is that of rouge-score, and the similarity of code that of Python's
difflib. Data sets in Chinese are not supported.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from quire.errors import ConfigError, UnknownName
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.metrics import (
    best_rouge,
    class_found,
    code_similarity,
    require_rouge,
    share_of_numbers,
    word_f1,
)
from quire.evals.suite.readers.records import first_text, records, texts
from quire.sim.traces.reading import Row

SCORE = "score"
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"

_Scorer = Callable[[str, Sample], float]


def _best_f1(output: str, sample: Sample) -> float:
    return max(word_f1(output, one) for one in sample.references)


def _rouge_l(output: str, sample: Sample) -> float:
    return best_rouge(output, sample.references)["rougeL"]


def _numbers(output: str, sample: Sample) -> float:
    return max(share_of_numbers(output, one) for one in sample.references)


def _class(output: str, sample: Sample) -> float:
    return max(class_found(output, one, sample.classes) for one in sample.references)


def _code(output: str, sample: Sample) -> float:
    return max(code_similarity(output, one) for one in sample.references)


@dataclass(frozen=True, slots=True)
class _DataSet:
    """How one data set is scored: the scorer, output tokens, whether the first line counts only."""

    scorer: _Scorer
    max_tokens: int
    first_line: bool = False


_QUESTIONS = ("multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "qasper", "narrativeqa")
_SUMMARIES = ("gov_report", "qmsum", "multi_news")
DATA_SETS: Mapping[str, _DataSet] = MappingProxyType(
    {
        **{name: _DataSet(_best_f1, 64) for name in _QUESTIONS},
        **{name: _DataSet(_rouge_l, 512) for name in _SUMMARIES},
        "samsum": _DataSet(_rouge_l, 128, first_line=True),
        "triviaqa": _DataSet(_best_f1, 32, first_line=True),
        "trec": _DataSet(_class, 64, first_line=True),
        "passage_count": _DataSet(_numbers, 32),
        "passage_retrieval_en": _DataSet(_numbers, 32),
        "lcc": _DataSet(_code, 64),
        "repobench-p": _DataSet(_code, 64),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongBench(EvalTask):
    """One data set of LongBench or MiniLongBench."""

    name: str = "longbench"
    summary: str = "one data set of LongBench or MiniLongBench, by its own metric (file: LongBench)"
    source: str = "a data set of LongBench (.jsonl) or MiniLongBench (.json)"
    metrics: ClassVar[tuple[str, ...]] = (SCORE,)

    def check(self) -> None:
        """See `EvalTask`."""
        require_rouge(self.name)

    def files(self, path: Path) -> list[Path]:
        """See `EvalTask`."""
        configs = (_config_file(path, name) for name in (PROMPTS, LENGTHS))
        return [path, *(found for found in configs if found is not None)]

    def samples(self, options: SampleOptions) -> list[Sample]:
        """See `EvalTask`."""
        path = options.file(self.name, self.source)
        rows = records(path, options.count)
        name = _data_set(path, rows[0])
        if "origin_prompt" in rows[0].values:
            return [_mini_sample(name, row) for row in rows]
        template, max_tokens = _template(path, name), _max_tokens(path, name)
        return [_sample(name, row, template, max_tokens) for row in rows]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Score by the metric of the data set."""
        data_set = DATA_SETS[sample.data_set]
        text = output.lstrip("\n").split("\n")[0] if data_set.first_line else output
        return {SCORE: data_set.scorer(text, sample)}


def _data_set(path: Path, row: Row) -> str:
    name = str(row.values.get("dataset", path.name.partition(".")[0]))
    if name not in DATA_SETS:
        raise UnknownName("data set of LongBench", name, DATA_SETS)
    return name


def _mini_sample(name: str, row: Row) -> Sample:
    prompt, data_set = first_text(row, "origin_prompt"), DATA_SETS[name]
    return _of(name, prompt, texts(row, "gold"), data_set.max_tokens)


def _sample(name: str, row: Row, template: str, max_tokens: int) -> Sample:
    values = {key: str(row.values.get(key) or "") for key in ("context", "input")}
    classes = row.values.get("all_classes")
    listed = tuple(map(str, classes)) if isinstance(classes, list) else ()
    return _of(name, template.format(**values), texts(row, "answers"), max_tokens, listed)


def _of(
    name: str,
    prompt: str,
    references: tuple[str, ...],
    max_tokens: int,
    classes: tuple[str, ...] = (),
) -> Sample:
    return Sample(
        prompt=prompt,
        references=references,
        max_tokens=max_tokens,
        classes=classes,
        data_set=name,
    )


def _template(path: Path, name: str) -> str:
    found, template = _config(path, PROMPTS, name)
    try:
        str(template).format(context="", input="")
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{found}: expected a prompt for {name!r} with {{context}} and {{input}}, got "
            f"{template!r}"
        ) from error
    return str(template)


def _max_tokens(path: Path, name: str) -> int:
    found, value = _config(path, LENGTHS, name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{found}: expected output tokens of {name!r} (1 or more), got {value!r}")
    return value


def _config_file(path: Path, file: str) -> Path | None:
    """One of LongBench's config files, in the folder of a data file or in its subfolder."""
    places = (path.with_name(file), path.parent / "config" / file)
    return next((place for place in places if place.exists()), None)


def _config(path: Path, file: str, name: str) -> tuple[Path, object]:
    """The path of one of LongBench's config files, and its entry of a data set."""
    found = _config_file(path, file)
    if found is None:
        raise ConfigError(
            f"{path.name} needs LongBench's {file}: copy its folder config from LongBench's "
            f"repository to {path.parent}"
        )
    try:
        return found, json.loads(found.read_text(encoding="utf-8"))[name]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{found}: expected an entry {name!r}, got {error!r}") from error
