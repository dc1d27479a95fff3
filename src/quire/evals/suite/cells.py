"""Results of cells: one task at one length with one configuration; stored one file each."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.evals.intervals import SHARE, Mean, mean_of
from quire.evals.suite.perplexity import NLL, PERPLEXITY
from quire.layout.files import replace_file

FOLDER = "cells"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """Scores and resources of one prompt."""

    scores: Mapping[str, float]  # empty if the prompt does not count: full KV's output is empty
    depth: float | None  # of the answer, 0 to 1; None: it has none
    chance: float  # score of random guessing
    prompt_tokens: int
    output_tokens: int
    kv_peak_bytes: int | None  # None: it ran with cached prefixes of other requests
    output: str
    output_ids: Sequence[int] | None = None  # only if configurations follow full KV's output


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """All prompts of one cell."""

    task: str
    tokens: int  # length of the prompts
    arm: str  # name of the configuration
    prompts: tuple[PromptResult, ...]
    seconds: float  # of all prompts in one batch

    @property
    def name(self) -> str:
        return f"{self.task}_{self.tokens}"

    @property
    def metrics(self) -> list[str]:
        return list(next(prompt.scores for prompt in self.prompts if prompt.scores))

    @property
    def kv_peak_bytes(self) -> int:
        return max(prompt.kv_peak_bytes or 0 for prompt in self.prompts)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(prompt.output_tokens for prompt in self.prompts) / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        tokens = sum(prompt.prompt_tokens + prompt.output_tokens for prompt in self.prompts)
        return tokens / self.seconds

    def values(self, metric: str) -> list[float]:
        return [prompt.scores[metric] for prompt in self.prompts if prompt.scores]

    def means(self) -> dict[str, Mean]:
        """Mean and interval of each metric; with `nll` also the perplexity."""
        found = {
            name: mean_of(self.values(name), limits=None if name == NLL else SHARE)
            for name in self.metrics
        }
        if NLL in found:
            nll = found[NLL]
            ends = (math.exp(nll.mean), math.exp(nll.low), math.exp(nll.high))
            return {PERPLEXITY: Mean(*ends, nll.count, math.exp(nll.most)), **found}
        return found

    def by_depth(self, metric: str) -> dict[str, float]:
        """Mean of a metric at each depth; empty for tasks without depths."""
        found: dict[str, list[float]] = {}
        for prompt in self.prompts:
            if prompt.depth is not None and prompt.scores:
                found.setdefault(f"{prompt.depth:g}", []).append(prompt.scores[metric])
        return {depth: sum(values) / len(values) for depth, values in found.items()}

    def summary(self) -> dict[str, object]:
        """Scores and resources as JSON values, without single prompts."""
        return {
            "task": self.task,
            "tokens": self.tokens,
            "kv": self.arm,
            "prompts": len(self.prompts),
            "scores": {name: asdict(mean) for name, mean in self.means().items()},
            "by_depth": self.by_depth(self.metrics[0]),
            "chance": mean_of([prompt.chance for prompt in self.prompts]).mean,
            "prompt_tokens": sum(prompt.prompt_tokens for prompt in self.prompts),
            "output_tokens": sum(prompt.output_tokens for prompt in self.prompts),
            "kv_peak_bytes": self.kv_peak_bytes,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "seconds": self.seconds,
        }


class CellFolder:
    """A file for each finished cell, written atomically; nothing is stored without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / FOLDER

    def resumption(self, cells: Iterable[tuple[str, str]]) -> Iterator[str]:
        """A line with the number of stored cells, by name and fingerprint, if there are any."""
        found = [self.cell(*cell) is not None for cell in cells]
        if any(found):
            yield f"resumes: {sum(found)} of {len(found)} results are stored in {self._folder}"

    def cell(self, name: str, fingerprint: str) -> CellResult | None:
        """The stored cell of equal options; None if there is none."""
        values = self.read(name, fingerprint)
        if values is None:
            return None
        try:
            prompts = tuple(PromptResult(**prompt) for prompt in values.pop("prompts"))
            return CellResult(prompts=prompts, **values)
        except (TypeError, KeyError):
            return None  # written by another version

    def read(self, name: str, fingerprint: str) -> dict[str, Any] | None:
        """Stored values of equal options; None if there are none."""
        if self._folder is None:
            return None
        try:
            stored = json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
            values = stored["values"] if stored["of"] == fingerprint else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not measured yet, or damaged
        return values if isinstance(values, dict) else None

    def write(self, name: str, fingerprint: str, values: Mapping[str, object]) -> None:
        if self._folder is None:
            return
        text = json.dumps({"of": fingerprint, "values": values}, indent=1)
        path = self._folder / f"{name}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; name another folder with --out"
            ) from error
