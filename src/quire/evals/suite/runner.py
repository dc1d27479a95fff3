"""Runs an evaluation: the sanity check, the cells of each configuration, then the verdicts."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

from quire.api.llm import LLM
from quire.config.generation_request import OptionsOfMany
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.evals.fidelity import ForcedToken, generate_after
from quire.evals.intervals import DIFFERENCE, MIN_PROMPTS, Mean, mean_of
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.cells import CellFolder, CellResult, PromptResult
from quire.evals.suite.engines import CONFIGURED, FULL, Engines, full_kv, is_full, kv_name
from quire.evals.suite.perplexity import NLL, PERPLEXITY
from quire.evals.suite.sanity import SKIPPED, Sanity, sanity_of
from quire.evals.tune.scores import fingerprint_of
from quire.layout.eviction import PREFILL_END
from quire.layout.sparse import parse_sparse
from quire.policies.eviction import make_eviction
from quire.sampling.detokenizer import Detokenizer
from quire.sampling.outputs import RequestOutput, Usage


class SampleRunner:
    """Runs samples in one engine.

    Before a question, the KV of the context is evicted, and the question's tokens follow as forced
    outputs, which sparse attention reads for. The default, None, is to do so if a rule evicts at
    the end of the prefill only, and with sparse attention: else the first output token is that of
    full KV. The tokens of a continuation are forced outputs too:
    each is a decode step, so that a rule acts on them as on an output.

    Args:
        llm: the engine.
        kv: the configuration that the samples run with.
        evict_before_question: as above.
        shares_prefill: whether the engine has the rules of several runs and a prefix cache: each
            request names its own rule. The first sample then also runs without cached prefixes:
            only its KV bytes are those of a request of its own, and the others have none.
        alone_kv_bytes: with a shared prefill, bytes of the first sample in another engine; None: it
            runs here.
    """

    def __init__(
        self,
        llm: LLM,
        kv: KVConfig,
        *,
        evict_before_question: bool | None = None,
        shares_prefill: bool = False,
        alone_kv_bytes: int | None = None,
    ) -> None:
        self._llm, self._kv, rule = llm, kv, make_eviction(kv.evict)
        is_sparse = parse_sparse(kv.sparse) is not None
        self._before = rule.when == PREFILL_END or is_sparse
        if evict_before_question is not None:
            self._before = (rule.evicts or is_sparse) and evict_before_question
        self._shares_prefill, self._alone_kv_bytes = shares_prefill, alone_kv_bytes

    def run(
        self, task: EvalTask, samples: Sequence[Sample], full: CellResult | None = None
    ) -> tuple[tuple[PromptResult, ...], float]:
        """Results in the order of the samples, and the seconds of the engine.

        With a task that scores the outputs of full KV, these are in `full`; None: this is full KV.

        Raises:
            ConfigError: all outputs of full KV are empty.
        """
        if task.follows_full:
            followed = self._results(task, samples) if full is None else full.prompts
            if not any(prompt.output_ids for prompt in followed):
                raise ConfigError(
                    f"every output of task {task.name!r} with full KV is empty: leave the task out"
                )
            samples = [
                replace(sample, followed=tuple(prompt.output_ids or ()))
                for sample, prompt in zip(samples, followed, strict=True)
            ]
        started = time.perf_counter()
        results = self._results(task, samples)
        if self._shares_prefill:
            alone = self._alone_kv_bytes
            alone = self.kv_bytes(task, samples[0]) if alone is None else alone
            known = [alone, *[None] * (len(samples) - 1)]
            results = tuple(
                replace(one, kv_peak_bytes=kv_bytes)
                for one, kv_bytes in zip(results, known, strict=True)
            )
        return results, time.perf_counter() - started

    def kv_bytes(self, task: EvalTask, sample: Sample) -> int:
        """Peak KV bytes of a sample that runs alone and reads no prefix of another request."""
        # of the task too: windows of two tasks begin with the same text
        salt = f"{task.name} {self._kv.evict} {self._kv.sparse}"
        found = self._results(task, [sample], cache_salt=salt)[0].kv_peak_bytes
        assert found is not None, "a finished request has a peak"
        return found

    def _results(
        self, task: EvalTask, samples: Sequence[Sample], **options: Unpack[OptionsOfMany]
    ) -> tuple[PromptResult, ...]:
        if self._shares_prefill:
            options |= OptionsOfMany(evict=self._kv.evict, sparse=self._kv.sparse)
        split = [self._split(task, sample) for sample in samples]
        params = [
            SamplingParams(
                max_tokens=len(question) + len(rest) + sample.max_tokens * (not rest),
                temperature=0.0,
                stop=() if rest else sample.stop,
                ignore_eos=bool(rest),
            )
            for sample, (_, question, rest) in zip(samples, split, strict=True)
        ]
        prompts = [prompt for prompt, _, _ in split]
        forced = [[*question, *rest] for _, question, rest in split]
        scored: list[list[ForcedToken]] = []
        outputs = generate_after(self._llm, prompts, forced, params, scored=scored, **options)
        found = []
        for index, (sample, output) in enumerate(zip(samples, outputs, strict=True)):
            if output.error is not None:
                raise RequestError(f"a request of the evaluation failed: {output.error}")
            _, question, rest = split[index]
            text = self._text_after(output, question)
            given = task.score_forced(scored[index][len(question) :]) if rest else None
            score = task.score(sample, text) if given is None else given
            result = _result(sample, score, _usage_after(output.usage, question), output=text)
            if task.follows_full:
                ids = output.token_ids[len(question) :] if text else ()
                known = sample.followed
                result = replace(result, output_ids=ids if known is None else known)
            found.append(result)
        return tuple(found)

    def _text_after(self, output: RequestOutput, question: Sequence[int]) -> str:
        """The output without the forced tokens of the question."""
        ids = output.prompt_token_ids
        texts = Detokenizer(self._llm.model.tokenizer, ids, skip_special_tokens=True)
        return output.text[sum(len(texts.push(token)) for token in question) :]

    def _split(self, task: EvalTask, sample: Sample) -> tuple[list[int], list[int], list[int]]:
        """Token ids of the prompt, of the question after its eviction, and of the continuation."""
        ids, rest, question = self._llm.encode(sample.prompt), list[int](), list[int]()
        if sample.continuation:  # encoded with the prompt as one text
            rest = self._llm.encode(sample.prompt + sample.continuation)[len(ids) :]
        rest = rest if sample.followed is None else list(sample.followed)
        most = self._llm.model.spec.max_positions - max(len(rest), sample.max_tokens)
        if len(ids) > most:
            raise ConfigError(
                f"a prompt of task {task.name!r} has {len(ids)} tokens; with its "
                f"{sample.max_tokens} output tokens the model's context holds {most}: lower "
                "--tokens"
            )
        if self._before:
            ids, question = split_at_question(self._llm, sample)
        return ids, question, rest


def _usage_after(usage: Usage, question: Sequence[int]) -> Usage:
    return replace(
        usage,
        prompt_tokens=usage.prompt_tokens + len(question),
        completion_tokens=usage.completion_tokens - len(question),
    )


def split_at_question(llm: LLM, sample: Sample) -> tuple[list[int], list[int]]:
    """Token ids of the context and of the question, encoded as one text."""
    ids = llm.encode(sample.prompt)
    count = len(llm.encode(sample.prompt.removesuffix(sample.question)))
    return ids[:count], ids[count:]


def _result(
    sample: Sample,
    scores: dict[str, float],
    usage: Usage,
    *,
    output: str = "",
) -> PromptResult:
    return PromptResult(
        scores=scores,
        depth=sample.depth,
        chance=sample.chance,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        kv_peak_bytes=usage.kv_peak_bytes,
        output=output,
    )


WORSE, BETTER, SAME, NONE = "worse", "better", "no difference found", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """Comparison of one cell."""

    cell: str
    metric: str
    verdict: str  # one of `WORSE`, `BETTER`, `SAME`, `NONE`
    difference: Mean  # from full KV, with its interval over the prompts
    reason: str = ""  # why there is no verdict


def compare(
    task: EvalTask, full: CellResult, configured: CellResult, sanity: Sanity
) -> TaskVerdict:
    """Compare two cells of the same prompts."""
    metric = task.metrics[0]
    pairs = zip(configured.values(metric), full.values(metric), strict=True)
    difference = mean_of(
        [found - reference for found, reference in pairs],
        limits=None if metric == NLL else DIFFERENCE,
    )
    verdict = _direction(difference, lower_is_better=task.lower_is_better)
    reason, score = sanity.refusal(task.name), mean_of(full.values(metric)).mean
    if not reason and task.needs_full is not None and score < task.needs_full:
        reason = f"expected at least {task.needs_full:g} with full KV, got {score:.2f}"
    if not reason and difference.count < MIN_PROMPTS:
        reason = (
            f"expected {MIN_PROMPTS} prompts or more for a verdict, got {difference.count}: raise "
            "--num-prompts"
        )
    return TaskVerdict(
        cell=full.name,
        metric=metric,
        verdict=NONE if reason else verdict,
        difference=difference,
        reason=reason,
    )


def _direction(difference: Mean, *, lower_is_better: bool) -> str:
    """The interval decides: an interval with 0 inside shows no difference."""
    if difference.low <= 0 <= difference.high:
        return SAME
    return BETTER if (difference.mean < 0) == lower_is_better else WORSE


Report = Callable[[str], None]
"""Takes a line about the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What is evaluated."""

    tasks: tuple[EvalTask, ...]
    tokens: tuple[int, ...]  # lengths of the prompts
    count: int  # prompts of each task and length
    seed: int = 1
    data: Path | None = None  # text file that a perplexity reads; None: packaged books
    sanity: bool = True  # whether the sanity check runs
    evict_before_question: bool | None = None  # as in `SampleRunner`

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("expected a suite or a task, got none: add --suite quick")
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"expected --tokens of 1 or more, got {list(self.tokens)}")
        if self.count < 1:
            raise ConfigError(f"expected --num-prompts of 1 or more, got {self.count}")
        if self.data is not None and PERPLEXITY not in (task.name for task in self.tasks):
            raise ConfigError(
                f"--data {self.data}: expected the task perplexity, which reads it; add --tasks "
                "perplexity"
            )
        if self.data is not None and not self.data.is_file():
            raise ConfigError(f"expected --data with a text file, got {self.data}: no such file")

    def cells(self) -> list[tuple[EvalTask, int]]:
        return [(task, tokens) for task in self.tasks for tokens in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of a run."""

    sanity: Sanity
    cells: Mapping[str, Sequence[CellResult]]
    # comparison with full KV; empty if nothing differs from full KV
    verdicts: tuple[TaskVerdict, ...]

    def claims(self) -> dict[str, int | float]:
        found: dict[str, int | float] = {}
        for arm, results in self.cells.items():
            for cell in results:
                found |= _claims(cell, "" if len(self.cells) == 1 else f"{arm}_")
        return found | {"sanity_check_passed": int(self.sanity.passed)}


def _claims(cell: CellResult, prefix: str) -> dict[str, int | float]:
    name = f"{prefix}{cell.name}"
    found: dict[str, int | float] = {}
    for metric, mean in cell.means().items():
        found[f"{name}_{metric}"] = mean.mean
        found[f"{name}_{metric}_low"], found[f"{name}_{metric}_high"] = mean.low, mean.high
    found[f"{name}_kv_peak_bytes"] = cell.kv_peak_bytes
    found[f"{name}_output_tokens_per_s"] = cell.output_tokens_per_s
    return found


class Evaluator:
    """Runs an evaluation of one model."""

    def __init__(
        self,
        engines: Engines,
        kv: KVConfig,
        config: EvalConfig,
        *,
        identity: Sequence[object],
        stored: CellFolder,
        report: Report,
    ) -> None:
        self._engines, self._kv, self._config = engines, kv, config
        self._identity, self._stored, self._report = identity, stored, report

    def run(self) -> Evaluation:
        arms = {FULL: full_kv(self._kv)}
        if not is_full(self._kv):
            arms[CONFIGURED] = self._kv
            self._engines.of(self._kv)  # refuses an invalid rule or codec at once
        listed = [self._key(*cell, *one) for one in arms.items() for cell in self._config.cells()]
        for line in self._stored.resumption(listed):
            self._report(line)
        sanity = self._sanity()
        cells: dict[str, list[CellResult]] = {}
        for arm, kv in arms.items():
            cells[arm] = self._cells(arm, kv, cells.get(FULL))
        verdicts = tuple(
            compare(task, full, found, sanity)
            for (task, _), full, found in zip(
                self._config.cells(), cells[FULL], cells.get(CONFIGURED, ()), strict=False
            )
        )
        return Evaluation(sanity=sanity, cells=cells, verdicts=verdicts)

    def _sanity(self) -> Sanity:
        if not self._config.sanity:
            return SKIPPED
        return sanity_of(
            self._engines,
            full_kv(self._kv),
            tasks=[task.name for task in self._config.tasks],
            seed=self._config.seed,
            identity=self._identity,
            stored=self._stored,
            report=self._report,
            make_prompts=lambda: [self._samples(*cell) for cell in self._config.cells()],
        )

    def _cells(self, arm: str, kv: KVConfig, full: Sequence[CellResult] | None) -> list[CellResult]:
        cells = self._config.cells()
        known = [None] * len(cells) if full is None else full
        return [
            self._cell(task, tokens, arm, kv, one)
            for (task, tokens), one in zip(cells, known, strict=True)
        ]

    def _cell(
        self, task: EvalTask, tokens: int, arm: str, kv: KVConfig, full: CellResult | None
    ) -> CellResult:
        key = self._key(task, tokens, arm, kv)
        found = self._stored.cell(*key)
        if found is None:
            found = self._measured(task, tokens, kv, full)
            self._stored.write(*key, asdict(found))
        metric, mean = next(iter(found.means().items()))
        self._report(
            f"{task.name} at {tokens} tokens, {found.arm}: {metric} {mean}, {found.seconds:.1f} s"
        )
        return found

    def _measured(
        self, task: EvalTask, tokens: int, kv: KVConfig, full: CellResult | None
    ) -> CellResult:
        llm = self._engines.of(kv)
        before = self._config.evict_before_question
        runner = SampleRunner(llm, kv, evict_before_question=before)
        prompts, seconds = runner.run(task, self._samples(task, tokens), full)
        return CellResult(
            task=task.name, tokens=tokens, arm=kv_name(kv), prompts=prompts, seconds=seconds
        )

    def _samples(self, task: EvalTask, tokens: int) -> list[Sample]:
        """The prompts of a task; an engine must be open."""
        self._engines.refuse_long(tokens)
        options = SampleOptions(
            count=self._config.count,
            measure=self._engines.measure,
            tokens=tokens,
            seed=self._config.seed,
            data=self._config.data if task.name == PERPLEXITY else None,
        )
        return task.samples(options)

    def _key(self, task: EvalTask, tokens: int, arm: str, kv: KVConfig) -> tuple[str, str]:
        """Name and fingerprint of a stored cell."""
        config = self._config
        data = config.data if task.name == PERPLEXITY else None
        content = "" if data is None else _digest(data)
        options = (tokens, config.count, config.seed, config.evict_before_question)
        more = further_parts(task, kv, full_kv(kv))
        fingerprint = fingerprint_of(*self._identity, kv, task, options, content, *more)
        return f"{task.name}-{tokens}-{arm}", fingerprint


def further_parts(task: EvalTask, kv: KVConfig, reference: KVConfig) -> list[object]:
    """What a stored cell also depends on: files of its rule, and full KV if its output is scored.

    Most cells depend on neither. A file that is missing is an error only when its entry runs.
    """
    names = [kv.policy_file]
    with suppress(ConfigError):
        names.append(make_eviction(kv.evict).budget.file)
    found: list[object] = [_digest(Path(name)) for name in names if name and Path(name).is_file()]
    return [*found, reference] if task.follows_full else found


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
