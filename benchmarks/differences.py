"""How far answers move without `--batch-invariant`: by cause, codec and rule."""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads, quick_option
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
from quire.cli.tables import show_table
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel, load_model
from quire.sampling.outputs import OutputBuilder, RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

AMPLE_BYTES = 256 << 20
PREEMPT_EVERY = 3  # steps
MAX_PREEMPTIONS = 3  # of a request, so that each ends
KINDS: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "n": 3},
    {"use_beam_search": True, "beam_width": 3, "n": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)
"""Sampling parameters of the requests, in turn."""

BATCHES, SWAP, RECOMPUTE, PREFIX_HIT = "batches", "swap", "recompute", "prefix hit"
CAUSES = (BATCHES, SWAP, RECOMPUTE, PREFIX_HIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencesConfig:
    """Configuration of the comparison.

    Attributes:
        model: name of the model, in float32.
        codecs, rules: each codec is combined with each rule that it supports.
        requests: number of requests with random prompts.
        max_prompt_tokens, max_new_tokens: largest numbers of tokens.
        attention: attention backend.
        seeds: draws of the requests.
    """

    model: str = "quire-tiny"
    codecs: tuple[str, ...] = ("none", "int8", "fp8", "int4_hadamard", "kivi4")
    rules: tuple[str, ...] = (
        "full",
        "snapkv:cap=96,every=16",
        "h2o:cap=96,every=16",
        "kvcrush:base=h2o,cap=192,every=16",
    )
    requests: int = 14
    max_prompt_tokens: int = 300
    max_new_tokens: int = 60
    attention: str = "auto"
    seeds: tuple[int, ...] = (0, 1, 2)


QUICK_DIFFERENCES = DifferencesConfig(
    codecs=("none", "kivi4"), rules=("full",), requests=5, max_new_tokens=8, seeds=(0,)
)


@dataclass(slots=True)
class Difference:
    """Largest differences from runs in ample memory, over all seeds.

    Attributes:
        logprob: of log-probabilities of output tokens, while the tokens of an output agree.
        outputs: outputs with other tokens.
        of: compared outputs.
        events: preemptions, or requests with cached tokens.
    """

    logprob: float = 0.0
    outputs: int = 0
    of: int = 0
    events: int = 0

    def add(self, ours: "Answers", theirs: "Answers") -> None:
        """Count the differences of two runs of the same requests."""
        self.events += ours.events
        for name, expected in theirs.outputs.items():
            for a, b in zip(ours.outputs[name].choices, expected.choices, strict=True):
                self.of += 1
                self.outputs += a.token_ids != b.token_ids
                pairs = zip(
                    a.logprobs or (), b.logprobs or (), a.token_ids, b.token_ids, strict=False
                )
                for ours_at, theirs_at, token, other in pairs:
                    if token != other:
                        break
                    self.logprob = max(
                        self.logprob,
                        abs(float(ours_at.logprob or 0) - float(theirs_at.logprob or 0)),
                    )


@dataclass(slots=True)
class Answers:
    """Outputs of one run, and the number of its preemptions or requests with cached tokens."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    events: int = 0


def draw_requests(config: DifferencesConfig, seed: int, vocab_size: int) -> list[GenerationRequest]:
    """Requests with random prompts of 3 to `max_prompt_tokens` tokens."""
    rng = random.Random(seed)
    made = []
    for i in range(config.requests):
        prompt = tuple(
            rng.randrange(2, vocab_size) for _ in range(rng.randint(3, config.max_prompt_tokens))
        )
        new_tokens = rng.randint(config.max_new_tokens // 3, config.max_new_tokens)
        options = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "seed": i}
        params = SamplingParams(**options, **KINDS[i % len(KINDS)])  # type: ignore[arg-type]
        made.append(GenerationRequest(prompt, params, request_id=f"r{i}"))
    return made


def answer(
    model: LoadedModel,
    requests: list[GenerationRequest],
    kv: KVConfig,
    schedule: ScheduleConfig,
    *,
    times: int = 1,
    preempt: bool = False,
) -> Answers:
    """Run the requests `times` times, or preempt one every few steps; the last outputs."""
    engine = Engine(model, kv, schedule)
    found = Answers()
    for _ in range(times):
        builders = {str(r.request_id): OutputBuilder(str(r.request_id), ()) for r in requests}
        for request in requests:
            engine.submit(request)
        step = 0
        while engine.has_work:
            step += 1
            if preempt and step % PREEMPT_EVERY == 0:
                _preempt(engine)
            for delta in engine.step():
                output = builders[delta.request_id].add(delta)
                if output is not None:
                    found.outputs[delta.request_id] = output
    cached = sum(output.usage.cached_tokens > 0 for output in found.outputs.values())
    found.events = engine.scheduler.num_preemptions or cached
    engine.close()
    return found


def _preempt(engine: Engine) -> None:
    """Preempt the last request in scheduling order that was rarely preempted."""
    scheduler = engine.scheduler
    rarely = [r for r in scheduler.running if r.progress.num_preemptions < MAX_PREEMPTIONS]
    if rarely:
        scheduler.lifecycle.preempt(max(rarely, key=scheduler.preempter.order), "as configured")


def measure_differences(
    config: DifferencesConfig, model: LoadedModel
) -> Iterator[tuple[str, str, dict[str, Difference]]]:
    """Yield codec, rule and the differences by cause."""
    for codec, rule in itertools.product(config.codecs, config.rules):
        yield codec, rule, differences_of(config, model, codec, rule)


def differences_of(
    config: DifferencesConfig, model: LoadedModel, codec: str, rule: str
) -> dict[str, Difference]:
    """Differences by cause of one codec and rule."""
    paged = rule != "full" and ("_page" in codec or codec.startswith("kivi"))
    options = {
        "memory": AMPLE_BYTES,
        "swap_space": 0,
        "codec": codec,
        "evict": f"{rule},granularity=page" if paged else rule,
        "attention": config.attention,
        "prefix_cache": PrefixCacheConfig(enabled=False),
    }
    plain = KVConfig(**options)  # type: ignore[arg-type]
    swapping = replace(plain, swap_space=AMPLE_BYTES)
    caching = replace(plain, prefix_cache=PrefixCacheConfig())
    found = {cause: Difference() for cause in CAUSES}
    for seed in config.seeds:
        requests = draw_requests(config, seed, model.spec.vocab_size)
        expected = answer(model, requests, plain, ScheduleConfig())
        others = ScheduleConfig(max_num_seqs=8, chunk_tokens=37)
        swap, recompute = ScheduleConfig(preempt="swap"), ScheduleConfig(preempt="recompute")
        for cause, ours in (
            (BATCHES, answer(model, requests, plain, others)),
            (SWAP, answer(model, requests, swapping, swap, preempt=True)),
            (RECOMPUTE, answer(model, requests, plain, recompute, preempt=True)),
            (PREFIX_HIT, answer(model, requests, caching, ScheduleConfig(), times=2)),
        ):
            found[cause].add(ours, expected)
    return found


def differences(
    *,
    model: Annotated[str, typer.Option(help="Name or folder of the model.")] = "quire-tiny",
    quick: Annotated[bool, quick_option("Two codecs, few requests, one seed.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Show how far answers move with other batches, preemption and prefix hits, in float32.

    Requests with random prompts (greedy, sampled with n=3, beams, penalties) run in ample memory
    and then with each cause. Columns: the largest difference of log-probabilities while tokens
    agree, outputs with other tokens, and preemptions or requests with cached tokens.
    """
    use_threads(threads)
    config = replace(QUICK_DIFFERENCES if quick else DifferencesConfig(), model=model)
    loaded = load_model(model, dtype="float32", device="cpu")
    rows, claims, arms = [], {}, {}
    for codec, rule, found in measure_differences(config, loaded):
        cells = [
            f"{one.logprob:.1e}, {one.outputs}/{one.of}, {one.events}" for one in found.values()
        ]
        rows.append((codec, rule, *cells))
        typer.echo("  ".join(rows[-1]))
        arms[f"{codec} {rule}"] = {cause: asdict(one) for cause, one in found.items()}
        for cause, one in found.items():
            name = f"{codec}_{rule.partition(':')[0]}_{cause.replace(' ', '_')}"
            claims[f"{name}_logprob"] = one.logprob
    show_table(
        "Differences from ample memory: log-probability, outputs with other tokens, events",
        ("codec", "rule", *CAUSES),
        rows,
    )
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench differences", claims, arms, used, quick=quick))
