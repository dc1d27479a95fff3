"""Runs a search and checks its result on prompts that the search did not use."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.kv_memory import codec_of
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, PolicyError, RequestError, TimeLimitReached
from quire.evals.intervals import SHARE, Mean, mean_of, prompts_to_show
from quire.evals.pace import Pace
from quire.evals.prompt_file import UserPrompt
from quire.evals.tune.predict import PredictedRows, predicted_rows
from quire.evals.tune.scores import ANSWER, METRICS, CandidateScorer
from quire.evals.tune.search import Round, halve
from quire.evals.tune.space import SearchCandidate, Space
from quire.models.loader import LoadedModel
from quire.sampling.outputs import OutputDelta
from quire.scheduler.schedule_config import ScheduleConfig

REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run."""

    running_at_once: int  # in a step
    tokens_per_s: float  # output tokens, median of the repeats
    kv_peak_bytes: int
    requests: int  # number of them


def measured_run(
    model: LoadedModel,
    kv: KVConfig,
    schedule: ScheduleConfig,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    repeats: int = REPEATS,
) -> MeasuredRun:
    """Run all prompts at once, without a prefix cache."""
    most = max(schedule.max_num_seqs, len(prompts))
    llm = LLM(
        model,
        kv=replace(kv, prefix_cache=PrefixCacheConfig(enabled=False)),
        schedule=replace(schedule, max_num_seqs=most),
        verify=False,
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    running, seconds = 0, list[float]()

    def progress(stats: EngineStats, deltas: list[OutputDelta]) -> None:
        nonlocal running
        running = max(running, stats.num_running)

    for _ in range(repeats):
        started_s = time.perf_counter()
        llm.generate([list(one) for one in prompts], params, progress=progress)
        seconds.append(time.perf_counter() - started_s)
    return MeasuredRun(
        running_at_once=running,
        tokens_per_s=len(prompts) * new_tokens / statistics.median(seconds),
        kv_peak_bytes=llm.stats().kv_peak_bytes,
        requests=len(prompts),
    )


REQUESTS, THROUGHPUT = "requests", "throughput"
OBJECTIVES = (REQUESTS, THROUGHPUT)
FINALISTS = 4
"""Candidates whose throughput is measured, if that is the objective."""

MIN_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Options of a search."""

    space: Space = field(default_factory=Space)
    metric: str = "top_1"  # one of `METRICS`
    min_quality: float = 0.99  # least mean of the metric, 0 to 1
    objective: str = REQUESTS  # one of `OBJECTIVES`
    max_tokens: int = 48
    held_out: float = 0.5  # share of the prompts that only check the result
    seed: int = 0
    measure: bool = True  # whether baseline and result run in the KV memory at the end

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"expected --metric {', '.join(METRICS)}, got {self.metric!r}")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"expected --objective of {OBJECTIVES}, got {self.objective!r}")
        if not 0 < self.min_quality <= 1:
            raise ConfigError(f"expected 0 < --min-quality <= 1, got {self.min_quality}")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"expected 0 < --held-out < 1, got {self.held_out}")
        if self.max_tokens < 1:
            raise ConfigError(f"expected --max-tokens of 1 or more, got {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of a search."""

    config: TuneConfig
    baseline: SearchCandidate  # all tokens in the first codec
    # the baseline if no candidate holds more requests at the wanted quality
    chosen: SearchCandidate
    predicted: Mapping[SearchCandidate, PredictedRows]  # requests in the KV memory, by candidate
    rounds: Sequence[Round]
    # quality of the chosen candidate, and of better ones that failed, on unused prompts
    held_out: Mapping[SearchCandidate, Mean]
    refused: Mapping[SearchCandidate, str]  # by this model or engine, with the reason
    runs: Mapping[SearchCandidate, MeasuredRun]  # in the KV memory; empty without measurement
    prompt_tokens: int  # mean prompt length, of which `predicted` speaks

    @property
    def gain(self) -> float:
        """Requests at once over those of the baseline."""
        return self.predicted[self.chosen].rows / self.predicted[self.baseline].rows

    @property
    def doubt(self) -> str:
        """Why the held-out prompts do not show the wanted quality; empty if they do."""
        quality, wanted = self.held_out[self.chosen], self.config.min_quality
        if self.chosen == self.baseline or quality.low >= wanted:
            return ""
        needed = f"; {prompts_to_show(wanted)} equal ones would" if wanted < 1 else ""
        return (
            f"{quality.count} held-out prompts do not show a {self.config.metric} of {wanted:g}: "
            f"the interval begins at {quality.low:.4g}{needed}."
        )

    def claims(self) -> dict[str, int | float]:
        found, quality = self.predicted[self.chosen], self.held_out[self.chosen]
        numbers: dict[str, int | float] = {
            "requests_gain": self.gain,
            "requests": found.rows,
            "baseline_requests": self.predicted[self.baseline].rows,
            "request_bytes": found.row_bytes,
            "held_out_quality": quality.mean,
            "held_out_low": quality.low,
            "held_out_high": quality.high,
            "held_out_prompts": quality.count,
        }
        for name, one in (("baseline", self.baseline), ("chosen", self.chosen)):
            if one in self.runs:
                numbers[f"{name}_running_at_once"] = self.runs[one].running_at_once
                numbers[f"{name}_tokens_per_s"] = self.runs[one].tokens_per_s
                numbers[f"{name}_kv_peak_bytes"] = self.runs[one].kv_peak_bytes
        return numbers


def divided(count: int, config: TuneConfig) -> tuple[list[int], list[int]]:
    """Numbers of the prompts of the search, and of those that check it."""
    order = np.random.default_rng(config.seed).permutation(count).tolist()
    held = max(1, round(count * config.held_out))
    if count < MIN_PROMPTS or held == count:
        raise ConfigError(f"expected at least {MIN_PROMPTS} prompts in --data, got {count}")
    return sorted(order[held:], key=order.index), sorted(order[:held])


def refuse_long(prompts: Sequence[UserPrompt], config: TuneConfig, model: LoadedModel) -> None:
    """Refuse prompts that exceed the model's context, and prompts without a needed answer."""
    most = model.spec.max_positions - config.max_tokens
    for number, one in enumerate(prompts, start=1):
        if len(one.token_ids) > most:
            raise ConfigError(
                f"prompt {number} of --data has {len(one.token_ids)} tokens; with --max-tokens "
                f"{config.max_tokens} the model's context holds {most}: shorten or remove it"
            )
        if config.metric == ANSWER and not one.answer:
            raise ConfigError(
                f"--metric answer needs an answer for each prompt; prompt {number} of --data has "
                "none: add it, or use --metric top_1"
            )


class Tuner:
    """Searches for one model and one set of prompts."""

    def __init__(
        self,
        model: LoadedModel,
        kv: KVConfig,
        schedule: ScheduleConfig,
        prompts: Sequence[UserPrompt],
        config: TuneConfig,
        *,
        scorer: CandidateScorer,
        pace: Pace,
    ) -> None:
        self._pace, self._place, self._left = pace, "", 0
        self._found: dict[SearchCandidate, Mean] = {}
        assert kv.memory is not None, "the command requires a size"
        self._model, self._kv, self._schedule = model, kv, schedule
        self._prompts, self._config, self._scorer = prompts, config, scorer
        self._kv_bytes = kv.memory
        self._prompt_tokens = math.ceil(np.mean([len(one.token_ids) for one in prompts]))
        self._refused: dict[SearchCandidate, str] = {}
        self._searched, self._held_out = divided(len(prompts), config)

    def run(self) -> Tuned:
        """Search, check on held-out prompts, and measure."""
        baseline = self._config.space.baseline
        predicted = self._predict()
        rows = {one: found.rows for one, found in predicted.items()}
        more = [one for one in predicted if one == baseline or rows[one] > rows[baseline]]
        self._pace.report(
            f"{len(more) - 1} of {len(self._config.space.candidates()) - 1} candidates hold more "
            f"requests than the baseline's {rows[baseline]}; {len(self._refused)} are refused"
        )
        rounds = halve(
            more,
            rows,
            self._quality,
            parts=self._config.space.parts,
            prompts=len(self._searched),
            wanted=self._config.min_quality,
            note=self._note,
        )
        self._note("held-out prompts", 0)
        finalists = [one for one in rounds[-1].kept if one not in self._refused]
        runs = self._runs(finalists, baseline)
        if self._config.objective == THROUGHPUT:
            finalists = sorted(runs, key=lambda one: -runs[one].tokens_per_s)
        chosen, checked = self._checked([*finalists, baseline])
        if self._config.measure:
            for one in (baseline, chosen):
                if one not in runs:
                    runs[one] = self._measured(one)
        return Tuned(
            config=self._config,
            baseline=baseline,
            chosen=chosen,
            predicted=predicted,
            rounds=rounds,
            held_out=checked,
            refused=self._refused,
            runs=runs,
            prompt_tokens=self._prompt_tokens,
        )

    def _predict(self) -> dict[SearchCandidate, PredictedRows]:
        found, baseline = dict[SearchCandidate, PredictedRows](), self._config.space.baseline
        for one in self._config.space.candidates():
            try:
                found[one] = self._rows_of(one)
            except ConfigError as error:
                self._refused[one] = str(error)
        if baseline in self._refused:
            raise ConfigError(f"{baseline}: {self._refused[baseline]}")
        if not found[baseline].rows:
            raise ConfigError(
                f"a KV memory of {self._kv_bytes:,} B does not hold one request of "
                f"{self._prompt_tokens} tokens and {self._config.max_tokens} new ones, which needs "
                f"{found[baseline].row_bytes:,} B: raise --kv-memory"
            )
        return found

    def _rows_of(self, one: SearchCandidate) -> PredictedRows:
        kv = one.applied(self._kv)
        return predicted_rows(
            self._model.spec,
            codec=codec_of(kv, self._model).codec,
            evict=kv.evict,
            sparse=kv.sparse,
            page_tokens=kv.page_tokens,
            kv_bytes=self._kv_bytes,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._config.max_tokens,
        )

    def _note(self, place: str, prompts: int) -> None:
        """Record the place of the search; end it at the time limit."""
        self._place, self._left = place, prompts
        if not self._pace.is_over:
            return
        good = [o for o, found in self._found.items() if found.mean >= self._config.min_quality]
        best = max(good, key=lambda o: self._rows_of(o).rows, default=None)
        so_far = "no candidate reaches --min-quality so far"
        if best is not None:
            found, rows = self._found[best], self._rows_of(best).rows
            so_far = f"best so far: {best}, {found} on {found.count} prompts, {rows} requests"
        raise TimeLimitReached(
            f"time limit at {place}: {so_far}; the same command with the same --out goes on"
        )

    def _quality(self, one: SearchCandidate, count: int) -> Mean:
        return self._quality_on(one, self._searched[:count], "prompts")

    def _quality_on(self, one: SearchCandidate, numbers: Sequence[int], kind: str) -> Mean:
        try:
            with self._pace.measuring(self._scorer.num_missing(one, numbers)):
                scores = self._scorer.scores(one, numbers)
        # what only a run finds out, such as a rule that raises
        except (ConfigError, PolicyError, RequestError) as error:
            if one == self._config.space.baseline:
                raise
            self._refused[one] = str(error)
            self._pace.report(f"{self._place}: {one}: refused: {error}")
            return Mean(0.0, 0.0, 0.0, 0, most=0.0)
        found = mean_of([one.quality(self._config.metric) for one in scores], limits=SHARE)
        self._found[one] = found
        self._pace.report(
            f"{self._place}: {one}: {self._config.metric} {found} on {found.count} {kind}"
            f"{self._pace.left(self._left)}"
        )
        return found

    def _checked(
        self, in_order: Sequence[SearchCandidate]
    ) -> tuple[SearchCandidate, dict[SearchCandidate, Mean]]:
        checked: dict[SearchCandidate, Mean] = {}
        for one in in_order:
            checked[one] = self._quality_on(one, self._held_out, "held-out prompts")
            if checked[one].mean >= self._config.min_quality:
                return one, checked
        return in_order[-1], checked

    def _runs(
        self, finalists: Sequence[SearchCandidate], baseline: SearchCandidate
    ) -> dict[SearchCandidate, MeasuredRun]:
        if self._config.objective != THROUGHPUT:
            return {}
        chosen = dict.fromkeys((*finalists[:FINALISTS], baseline))
        return {one: self._measured(one) for one in chosen}

    def _measured(self, one: SearchCandidate) -> MeasuredRun:
        prompts = [self._prompts[number].token_ids for number in self._held_out]
        found = measured_run(
            self._model,
            replace(one.applied(self._kv), memory=self._kv_bytes),
            self._schedule,
            prompts,
            new_tokens=self._config.max_tokens,
        )
        self._pace.report(
            f"{one}: {found.requests} held-out prompts ran, {found.running_at_once} of them at "
            f"once, {found.tokens_per_s:.0f} tokens/s"
        )
        return found
