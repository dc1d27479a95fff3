"""`python -m benchmarks soak`: growth of resident memory under load.

Requests arrive, finish, are preempted and cancelled.

    tokens    | warm-up | first tenth | ...................... | last tenth |
                        |<- median -->|      growth between     |<- median ->|

The warm-up includes the largest steps, so later growth is a leak. The slope is the least-squares
line through all samples after the warm-up.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import psutil
import torch
import typer

from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel, load_model
from quire.scheduler.events import EventLog
from quire.scheduler.schedule_config import ScheduleConfig

ARMS = {
    "everything": KVConfig(memory="24MiB"),  # holds about 30 requests of mean length
    "evicting": KVConfig(memory="8MiB", evict="recent:cap=64,every=16,sinks=4"),
}
WARM_UP_SHARE = 0.1
SAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """Workload: requests of random tokens with random arrivals.

    Attributes:
        tokens: tokens to generate, in both arms together.
        max_num_seqs: most running requests.
        prompt_tokens, new_tokens: most tokens of a prompt and of an output; each has at least 1.
        cancelled: fraction of the requests that are cancelled before they finish (0 to 1).
        seed: random seed of arrivals and lengths.
    """

    tokens: int = 100_000
    max_num_seqs: int = 64
    prompt_tokens: int = 96
    new_tokens: int = 128
    cancelled: float = 0.02
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of one arm.

    Attributes:
        arm: name of the arm.
        generated_tokens, preemptions, requests: totals, with the warm-up.
        samples: (tokens generated so far, resident bytes), after the warm-up.
    """

    arm: str
    generated_tokens: int
    preemptions: int
    requests: int
    samples: Sequence[tuple[int, int]]

    @property
    def growth_bytes(self) -> int:
        """Median of the last tenth of the samples minus the median of the first tenth."""
        resident = [rss_bytes for _, rss_bytes in self.samples]
        tenth = max(1, len(resident) // 10)
        return int(statistics.median(resident[-tenth:]) - statistics.median(resident[:tenth]))

    @property
    def growth_fraction(self) -> float:
        """Growth over the resident bytes after the warm-up."""
        return self.growth_bytes / self.samples[0][1]

    @property
    def slope_bytes_per_token(self) -> float:
        """Least-squares slope over all samples."""
        tokens, resident = np.array(self.samples, dtype=np.float64).T
        if len(tokens) < 2:
            return 0.0
        return float(np.polyfit(tokens, resident, 1)[0])


class Soak:
    """An engine under load.

    Args:
        model: model of the engine.
        kv: small KV memory.
        config: the workload.
        events: event log of the engine; None: a log of the default size.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVConfig,
        config: SoakConfig,
        *,
        events: EventLog | None = None,
    ) -> None:
        schedule = ScheduleConfig(max_num_seqs=config.max_num_seqs)
        self.engine = Engine(model, kv, schedule, events=events)
        self.generated_tokens = 0
        self.requests = 0
        self._config = config
        self._rng = random.Random(config.seed)

    def generate(self, tokens: int) -> None:
        """Run until the given number of further tokens has been generated."""
        goal = self.generated_tokens + tokens
        while self.generated_tokens < goal:
            if self.engine.scheduler.num_waiting < self._config.max_num_seqs // 8:
                self._arrive()
            self.generated_tokens += sum(len(delta.token_ids) for delta in self.engine.step())

    def finish(self) -> None:
        """Finish all requests, and check that every page is free.

        Raises:
            InvariantError: a page is not free.
        """
        while self.engine.has_work:
            self.generated_tokens += sum(len(delta.token_ids) for delta in self.engine.step())
        self.engine.check()

    def _arrive(self) -> None:
        rng, config = self._rng, self._config
        for _ in range(rng.randint(0, 3)):
            self.requests += 1
            vocab_size = self.engine.model.spec.vocab_size
            prompt = [
                rng.randrange(vocab_size) for _ in range(rng.randint(1, config.prompt_tokens))
            ]
            request_id = self.engine.submit(GenerationRequest(prompt, self._params()))
            if rng.random() < config.cancelled:
                self.engine.cancel(request_id)
        running = self.engine.scheduler.running
        if running and rng.random() < config.cancelled:
            self.engine.cancel(rng.choice(running).request_id)

    def _params(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=rng.randint(1, self._config.new_tokens),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logprobs=rng.choice([None, None, None, 3]),
            seed=rng.getrandbits(32),
            ignore_eos=True,
        )


def run_arm(arm: str, model: LoadedModel, config: SoakConfig) -> SoakResult:
    """Generate the arm's tokens and sample the resident memory."""
    tokens = max(SAMPLES, config.tokens // len(ARMS))
    soak, process = Soak(model, ARMS[arm], config), psutil.Process()
    soak.generate(int(WARM_UP_SHARE * tokens))
    samples = [(soak.generated_tokens, process.memory_info().rss)]
    while soak.generated_tokens < tokens:
        soak.generate(tokens // SAMPLES)
        samples.append((soak.generated_tokens, process.memory_info().rss))
    soak.finish()
    preemptions = soak.engine.scheduler.num_preemptions
    return SoakResult(arm, soak.generated_tokens, preemptions, soak.requests, tuple(samples))


def summarise(results: Sequence[SoakResult]) -> dict[str, int | float]:
    """Claims: growth of the arm that grew most, and totals of both arms."""
    worst = max(results, key=lambda result: result.growth_bytes)
    return {
        "rss_growth_bytes": worst.growth_bytes,
        "rss_growth_fraction": worst.growth_fraction,
        "rss_slope_bytes_per_token": max(result.slope_bytes_per_token for result in results),
        "generated_tokens": sum(result.generated_tokens for result in results),
        "requests": sum(result.requests for result in results),
        "preemptions": sum(result.preemptions for result in results),
    }


SLOPE_TOKENS = 10_000  # per arm; for fewer, single allocations of the C library decide the slope


def soak(
    *,
    tokens: Annotated[
        int,
        typer.Option(
            min=2_000, help="Tokens to generate at least; the second half runs with eviction."
        ),
    ] = 100_000,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure whether resident memory grows over generated tokens.

    quire-tiny serves requests with random arrivals in a small KV memory, with preemptions and
    cancellations, first without eviction and then with eviction.
    """
    use_threads(threads)
    config = SoakConfig(tokens=tokens)
    model = load_model("quire-tiny", dtype="float32", device="cpu", verify=False)
    results = []
    for arm in ARMS:
        result = run_arm(arm, model, config)
        results.append(result)
        typer.echo(
            f"{arm}: {result.generated_tokens:,} tokens, {result.requests:,} requests, "
            f"{result.preemptions:,} preemptions; resident {result.samples[0][1]:,} B after the "
            f"warm-up, {result.growth_bytes:+,} B since "
            f"({_slope_text(result)})"
        )
    if as_json:
        arms = {result.arm: asdict(result) for result in results}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench soak", summarise(results), arms, used))


def _slope_text(result: SoakResult) -> str:
    if result.generated_tokens < SLOPE_TOKENS:
        return f"too few tokens for a slope: run {2 * SLOPE_TOKENS:,} or more"
    return f"{result.slope_bytes_per_token:+.2f} B per token"
