"""Quality of candidates on prompts: measured once, and stored for a later run."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.evals.fidelity import FidelityScorer, PromptFidelity, Reference
from quire.evals.prompt_file import UserPrompt
from quire.evals.tune.space import SearchCandidate
from quire.layout.sparse import OFF
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """Quality of one candidate on one prompt."""

    fidelity: PromptFidelity  # agreement with full KV
    # 1.0 if the output contains the prompt's answer, else 0.0; None without an answer
    answered: float | None = None

    def quality(self, metric: str) -> float:
        if metric == ANSWER:
            assert self.answered is not None, "checked when the prompts were read"
            return self.answered
        return float(getattr(self.fidelity, metric))


ANSWER = "answer"
METRICS = ("top_1", "exact", ANSWER)
"""Qualities from 0 to 1: agreement of tokens, equal outputs, outputs with the known answer."""


class ScoreFile:
    """A JSON line for each measured candidate and prompt of one fingerprint."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._known = self._read()

    def get(self, candidate: SearchCandidate, prompt: int) -> PromptScore | None:
        return self._known.get((candidate, prompt))

    def resumption(self) -> Iterator[str]:
        """A line with the number of stored scores, if there are any."""
        if self._known:
            yield f"resumes: {len(self._known)} results are stored in {self._path}"

    def add(self, candidate: SearchCandidate, prompt: int, score: PromptScore) -> None:
        self._known[candidate, prompt] = score
        line = {"of": self._fingerprint, "prompt": prompt, **asdict(candidate), **asdict(score)}
        try:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error

    def _read(self) -> dict[tuple[SearchCandidate, int], PromptScore]:
        found: dict[tuple[SearchCandidate, int], PromptScore] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ()
        for line in lines:
            try:
                values = json.loads(line)
                if values["of"] != self._fingerprint:
                    continue
                fidelity = PromptFidelity(**values["fidelity"])
                score = PromptScore(fidelity=fidelity, answered=values["answered"])
                found[SearchCandidate(values["codec"], values["evict"]), values["prompt"]] = score
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut off when the process ended
        return found


def fingerprint_of(*parts: object) -> str:
    """A hash of the texts of all parts."""
    return hashlib.sha256("\n".join(map(_text, parts)).encode()).hexdigest()[:16]


def _text(part: object) -> str:
    """A dataclass without its options that are off by default and now; else the part's `repr`.

    A new option that is off leaves stored results valid, a changed default does not.
    """
    if not is_dataclass(part) or isinstance(part, type):
        return repr(part)
    found = [
        f"{field.name}={_text(value)}"
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default or value not in _OFF
    ]
    return f"{type(part).__name__}({', '.join(found)})"


_OFF = (None, "", "off", "none", False, ())


class CandidateScorer:
    """Measures candidates on prompts; references are generated once in a process."""

    def __init__(
        self,
        model: LoadedModel,
        kv: KVConfig,
        prompts: Sequence[UserPrompt],
        *,
        new_tokens: int,
        stored: ScoreFile,
        baseline: SearchCandidate,
        with_answers: bool,
    ) -> None:
        self._model, self._kv, self._prompts = model, kv, prompts
        self._with_answers = with_answers
        self._new_tokens, self._stored = new_tokens, stored
        self._longest_tokens = max(len(one.token_ids) for one in prompts) + new_tokens
        self._reference_scorer = self._scorer(replace(baseline.applied(kv), sparse=OFF))
        self._references: dict[int, Reference] = {}

    def open(self, candidate: SearchCandidate) -> FidelityScorer:
        return self._scorer(candidate.applied(self._kv))

    def _scorer(self, kv: KVConfig) -> FidelityScorer:
        return FidelityScorer(
            self._model,
            kv,
            longest_tokens=self._longest_tokens,
            new_tokens=self._new_tokens,
        )

    def reference(self, number: int) -> Reference:
        if number not in self._references:
            prompt = self._prompts[number].token_ids
            self._references[number] = self._reference_scorer.reference(prompt)
        return self._references[number]

    def num_missing(self, candidate: SearchCandidate, numbers: Sequence[int]) -> int:
        """Number of the prompts whose score is not stored."""
        return sum(self._stored.get(candidate, number) is None for number in numbers)

    def scores(self, candidate: SearchCandidate, numbers: Sequence[int]) -> list[PromptScore]:
        """In the order of the prompts; only those that are not stored are measured."""
        missing = [n for n in numbers if self._stored.get(candidate, n) is None]
        scorer = self.open(candidate) if missing else None
        for number in missing:
            assert scorer is not None, "a score is missing"
            self._stored.add(candidate, number, self._measure(scorer, number))
        found = (self._stored.get(candidate, number) for number in numbers)
        return [score for score in found if score is not None]

    def _measure(self, scorer: FidelityScorer, number: int) -> PromptScore:
        reference, prompt = self.reference(number), self._prompts[number]
        fidelity = scorer.score(reference)
        if not (self._with_answers and prompt.answer):
            return PromptScore(fidelity=fidelity)
        same = fidelity.exact == 1.0  # then the output is the reference's
        text = reference.text if same else scorer.reference(prompt.token_ids).text
        return PromptScore(fidelity=fidelity, answered=float(prompt.accepts(text)))
