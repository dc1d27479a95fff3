"""The cases of one type: a tiny model in the engine, compared with Transformers, or refused."""

import inspect
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.tiny import build, config_of
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits, UnsoundCombination, UnsupportedModel
from quire.layout import limits
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel, load_model
from quire.models.support import model_class, refuse_class, refuse_config
from quire.sampling.outputs import OutputBuilder, RequestOutput
from quire.sampling.sampler import SampledToken, Sampler
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import greedy
from support.kv_options import kv_config

# ---- what Transformers computes: the prompt in one call, then single tokens ----------------------


@dataclass(frozen=True)
class Expected:
    """The greedy output of Transformers.

    Attributes:
        prompt, tokens: token ids.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor  # [len(tokens), vocab], float32


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    shifted_by: int = 0,
    given: Sequence[int] = (),
) -> Expected:
    tokens, positions, rows = list(prompt), list(range(len(prompt))), []
    out = _forward(model, tokens, positions)
    while len(rows) < num_tokens:
        rows.append(out.logits[0, -1].float())
        tokens.append(given[len(rows) - 1] if len(rows) <= len(given) else int(rows[-1].argmax()))
        positions.append(len(tokens) - 1 + shifted_by)
        cache = getattr(out, "cache", None)  # OpenAI's GPT has none
        begin = 0 if cache is None else -1
        out = _forward(model, tokens[begin:], positions[begin:], cache)
    return Expected(list(prompt), tokens[len(prompt) :], torch.stack(rows))


@torch.inference_mode()
def scan(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits of given tokens after a prompt, from one call without a cache: [tokens, vocab]."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits: Tensor = model(ids, use_cache=False, return_dict=True).logits
    return logits[0, len(prompt) - 1 :].float()


@torch.inference_mode()
def beam_scores(
    model: PreTrainedModel, prompt: Sequence[int], width: int, num_tokens: int
) -> Tensor:
    """Scores of a beam search without a cache, best first: mean log-probabilities [width]."""
    tokens, scores = torch.tensor([list(prompt)]), torch.zeros(1)
    for _ in range(num_tokens):
        logits = model(tokens, use_cache=False, return_dict=True).logits[:, -1].float()
        sums = scores[:, None] + logits.log_softmax(dim=-1)
        scores, best = sums.flatten().topk(width)
        beam, token = best // sums.shape[1], best % sums.shape[1]
        tokens = torch.cat([tokens[beam], token[:, None]], dim=1)
    return scores / num_tokens


def _forward(model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], cache=None):
    takes = inspect.signature(model.forward).parameters
    at = {"position_ids": torch.tensor([list(positions)])} if "position_ids" in takes else {}
    held = {} if cache is None else {"cache": cache}
    return model(torch.tensor([tokens]), use_cache=True, return_dict=True, **at, **held)


def with_other_order(prompt: Sequence[int]) -> list[int]:
    """The prompt with its first half reversed: the control of types without positions."""
    half = len(prompt) // 2
    return [*reversed(prompt[:half]), *prompt[half:]]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits [rows, vocab], relative to the largest of its row."""
    if ours.shape != theirs.shape:
        return float("inf")
    relative = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1)
    return float(relative.nan_to_num(float("inf")).max())


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, vocab_size) for _ in range(count)]


# ---- a type --------------------------------------------------------------------------------------

EQUAL, REFUSED, FAILED, NOT_TESTED = "equal", "refused", "failed", "not tested"
INERT = "not observed"

PROMPT_TOKENS, NEW_TOKENS, SHARED_TOKENS, PAGE_TOKENS = 300, 40, 208, 16
BEAM_TOKENS = 8
LONGEST = PROMPT_TOKENS + NEW_TOKENS
TOLERANCE = 1e-3  # of logits, relative to the largest of their row
OF_ITSELF = 1e-2
"""The tolerance grows to the difference of Transformers' own decode and scan, at most to this."""

CODED_TOLERANCE = 5e-2
"""With codes and evictions a rounding error may change a code or a choice in the prompt, and so all
logits after it; half of the logits of one request stay within `TOLERANCE`."""

AMPLE_ROOM, TIGHT_ROOMS = 4.0, (1.85, 1.5, 1.15)
"""KV memory, in units of the peak of one request; the tight ones are tried until one preempts."""

RULES = {"h2o": "h2o:cap=96", "sinks": "sinks:cap=96,sinks=4"}
NOT_A_TEXT_DECODER = (limits.ENCODER, limits.ENCODER_DECODER, limits.MULTIMODAL)


@dataclass(kw_only=True)
class Case:
    """What came of one case.

    Attributes:
        result: equal, refused, failed, or not observed: what the case is about did not happen.
    """

    result: str = EQUAL
    why: str = ""  # of a refusal or a failure
    worst: float = 0.0  # largest relative difference of logits


@dataclass(kw_only=True)
class Found:
    """What came of a type.

    Attributes:
        is_text_decoder: not an encoder, an encoder-decoder, or a model of images or sound.
    """

    type: str  # `model_type`
    result: str = EQUAL  # equal, refused, failed or not tested
    why: str = ""  # of another result than equal
    is_text_decoder: bool = True
    kinds: tuple[str, ...] = ()  # of its layers' caches
    layers: int = 0  # number of attention layers of the tiny model
    control: str = ""  # what was changed in Transformers so that its tokens change
    own: float = 0.0  # largest relative difference between Transformers' decode and scan
    worst: float = 0.0  # of the cases against Transformers
    cases: dict[str, Case] = field(default_factory=dict)  # by name
    seconds: float = 0.0  # of the processor

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_type(model_type: str, cases: Sequence[str] | None = None) -> Found:
    """Build a tiny model of a type and run its cases; no error of a model is raised."""
    found, started_s = Found(type=model_type), time.process_time()
    try:
        _run(found, cases)
    except UnsupportedModel as error:
        found.result, found.why = REFUSED, str(error)
        found.is_text_decoder = not any(r.reason in found.why for r in NOT_A_TEXT_DECODER)
    except Exception as error:  # noqa: BLE001 - every exception is a finding
        found.result, found.why = FAILED, _text(error)
    found.seconds = round(time.process_time() - started_s, 1)
    return found


def _run(found: Found, cases: Sequence[str] | None) -> None:
    limits.refuse_model_type(found.type)
    config = config_of(found.type)
    refuse_config(config)
    if (causal := model_class(config)) is not None:
        refuse_class(causal)
    model = build(found.type)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_model(folder, dtype="float32", device="cpu")
    bench = Bench(model, loaded)
    found.kinds, found.layers = kinds_of(loaded.spec), loaded.spec.num_layers
    found.own = difference(bench.scanned, bench.expected["r0"].logits)
    bench.tolerance = max(TOLERANCE, min(2 * found.own, OF_ITSELF))
    found.control = _control(bench)
    left_out = () if "state" in found.kinds else OF_STATES
    names = [name for name in CASES if name not in left_out] if cases is None else cases
    for name in names:
        found.cases[name] = _case(CASES[name], bench)
    found.worst = max(found.cases[name].worst for name in names if name not in PLAIN)
    _judge(found)


def _judge(found: Found) -> None:
    by_result = {
        result: f"{name}: {case.why}"
        for name, case in reversed(found.cases.items())
        for result in [case.result]
    }
    if FAILED in by_result:
        found.result, found.why = FAILED, by_result[FAILED]
    elif not found.control:
        found.result, found.why = NOT_TESTED, "wrong positions and another order change no token"
    elif INERT in by_result:
        found.result, found.why = NOT_TESTED, by_result[INERT]


def _case(run: "Callable[[Bench], Case]", bench: "Bench") -> Case:
    try:
        return run(bench)
    except (UnsoundCombination, ConfigError) as error:
        return Case(result=REFUSED, why=str(error))
    except Exception as error:  # noqa: BLE001 - every exception is a finding
        return Case(result=FAILED, why=_text(error))


def _text(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = "; ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames)
    return f"{type(error).__name__}: {error} [{where}]"


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    found = dict.fromkeys(
        "latent" if heads.latent is not None
        else "shared" if layer.source is not None
        else "window" if layer.window is not None
        else "chunk" if layer.chunk is not None
        else "full"
        for layer, heads in zip(spec.layers, spec.heads, strict=True)
        if layer.attends
    )  # fmt: skip
    if any(layer.state is not None for layer in spec.layers):
        found["state"] = None
    if any(not heads.latent and heads.key_dim != heads.value_dim for heads in spec.heads):
        found["keys and values of unequal width"] = None
    if len(set(spec.heads)) > 1:
        found["heads by layer"] = None
    return tuple(found)


def _control(bench: "Bench") -> str:
    """What changes the tokens of Transformers and its logits: the comparison would see it."""
    right = bench.expected["r0"]
    wrong = {
        "positions": decode(bench.model, right.prompt, NEW_TOKENS, shifted_by=7),
        "order": decode(bench.model, with_other_order(right.prompt), NEW_TOKENS),
    }
    for name, other in wrong.items():
        moved = difference(other.logits, right.logits)
        if other.tokens != right.tokens and moved > 10 * bench.tolerance:
            return name
    return ""


class Recorder:
    def __init__(self, sampler: Sampler, forced: Mapping[str, Sequence[int]] | None) -> None:
        self._sampler, self._forced = sampler, forced
        self.rows: dict[str, list[Tensor]] = {}
        self.one_by_one = sampler.one_by_one

    def sample(self, logits, rows):
        for row_logits, request in zip(logits, rows, strict=True):
            seen = self.rows.setdefault(request.request_id, [])
            assert len(seen) == len(request.output_token_ids), "a token is sampled once"
            seen.append(row_logits.float().cpu().clone())
        if self._forced is None:
            return self._sampler.sample(logits, rows)
        return [SampledToken(self._forced[r.request_id][len(r.output_token_ids)]) for r in rows]

    def logits(self, request_id: str) -> Tensor:
        return torch.stack(self.rows[request_id])


@dataclass
class Bench:
    """A model in Transformers and in Quire, and the expected outputs."""

    model: PreTrainedModel  # with Transformers' own attention
    loaded: LoadedModel  # the same weights in Quire
    tolerance: float = TOLERANCE  # of logits

    @cached_property
    def expected(self) -> dict[str, Expected]:
        """Greedy outputs of two prompts that begin with the same tokens."""
        vocab_size = self.loaded.spec.vocab_size
        shared = random_tokens(SHARED_TOKENS, vocab_size, seed=0)
        prompts = [
            [*shared, *random_tokens(PROMPT_TOKENS - SHARED_TOKENS, vocab_size, seed=n)]
            for n in (1, 2)
        ]
        return {f"r{n}": decode(self.model, p, NEW_TOKENS) for n, p in enumerate(prompts)}

    @cached_property
    def scanned(self) -> Tensor:
        """Logits of the first output by Transformers without a cache."""
        first = self.expected["r0"]
        return scan(self.model, first.prompt, first.tokens)

    def engine(
        self, room: float, kv: Mapping[str, object] | None = None, **schedule: object
    ) -> Engine:
        """An engine whose KV memory holds the peak of `room` requests; no prefix cache."""
        options = {"page_tokens": PAGE_TOKENS, "enable_prefix_caching": False, **(kv or {})}
        config = ScheduleConfig(**{"max_num_seqs": 8, "admission": "optimistic", **schedule})
        of_disk = ("disk_memory", "disk_path", "kv_load")
        without = {name: value for name, value in options.items() if name not in of_disk}
        probe = Engine(self.loaded, kv_config(memory="64MiB", **without), config)
        peaks = probe.scheduler.peaks
        need = Need(LONGEST, eviction=probe.pool.eviction.spec)
        memory = max(int(room * peaks.peak_bytes(need)), peaks.fitting_bytes(need))
        return Engine(self.loaded, kv_config(memory=memory, **options), config)

    def run(self, engine: Engine, names: Sequence[str] = ("r0", "r1")) -> Recorder:
        """Run requests together, with the tokens of Transformers."""
        forced = {name: self.expected[name].tokens for name in self.expected}
        recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler, forced)
        for name in names:
            prompt = self.expected[name].prompt
            engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name))
        finish(engine)
        return recorder

    def compare(self, recorder: Recorder, names: Sequence[str] = ("r0", "r1")) -> Case:
        """Compare logits and tokens with those of Transformers."""
        return worst_of(
            self._compare(name, recorder.logits(name), self.expected[name]) for name in names
        )

    def _compare(self, name: str, ours: Tensor, theirs: Expected) -> Case:
        worst = difference(ours, theirs.logits)
        if not worst <= self.tolerance:
            return Case(result=FAILED, why=first_difference(name, ours, theirs.logits), worst=worst)
        for step, (row, token) in enumerate(zip(ours, theirs.tokens, strict=True)):
            top = theirs.logits[step].topk(2).values
            near_tie = top[0] - top[1] <= 2 * self.tolerance * top.abs().max()
            if int(row.argmax()) != token and not near_tie:
                why = f"{name}: token {step} is {int(row.argmax())}, not {token}"
                return Case(result=FAILED, why=why, worst=worst)
        return Case(worst=worst)


def finish(engine: Engine) -> None:
    for delta in chain.from_iterable(engine.step() for _ in iter(lambda: engine.has_work, False)):
        assert delta.finish_reason in (None, "length"), delta.error
    engine.check()


def first_difference(name: str, ours: Tensor, theirs: Tensor) -> str:
    moved = [difference(a[None], b[None]) for a, b in zip(ours, theirs, strict=False)]
    first = next((step for step, one in enumerate(moved) if not one <= TOLERANCE), len(moved))
    at = f" by {moved[first]:.1e}" if first < len(moved) else ""
    return f"{name}: logits differ from output token {first} on{at}, at most by {max(moved):.1e}"


def worst_of(cases) -> Case:
    """The first case that is not equal, else the one with the largest difference."""
    held = list(cases)
    failed = [case for case in held if case.result != EQUAL]
    return failed[0] if failed else max(held, key=lambda case: case.worst)


# ---- cases ---------------------------------------------------------------------------------------


def _chunks(tokens: int) -> Callable[[Bench], Case]:
    def run(bench: Bench) -> Case:
        return bench.compare(bench.run(bench.engine(AMPLE_ROOM, chunk_tokens=tokens)))

    return run


def _preempted(bench: Bench, *, swap: bool) -> Case:
    """Two requests of which one is preempted: by growth, else by an urgent one."""
    kv = {"swap_space": "256MiB"} if swap else {}
    how = {"preempt": "swap" if swap else "recompute"}
    for room in TIGHT_ROOMS:
        engine = bench.engine(room, kv, **how)
        try:
            recorder = bench.run(engine)
        except NeverFits:  # slabs of several page classes take more than is left
            break
        stats = engine.stats()
        if stats.num_preemptions and bool(stats.num_swaps) == swap:
            return bench.compare(recorder)
    engine = bench.engine(AMPLE_ROOM, kv, **how, urgent=0, max_num_seqs=1)
    recorder = _urgently(bench, engine)
    stats = engine.stats()
    if stats.num_preemptions and bool(stats.num_swaps) == swap:
        return bench.compare(recorder)
    return Case(result=INERT, why="no request was " + ("swapped out" if swap else "preempted"))


def _urgently(bench: Bench, engine: Engine) -> Recorder:
    forced = {name: bench.expected[name].tokens for name in bench.expected}
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler, forced)
    for priority, name in ((1, "r0"), (0, "r1")):
        engine.submit(
            GenerationRequest(
                bench.expected[name].prompt, greedy(NEW_TOKENS), request_id=name, priority=priority
            )
        )
        for _ in range(NEW_TOKENS // 2):
            engine.step()
    finish(engine)
    return recorder


def _prefix(bench: Bench) -> Case:
    for names in (("r0", "r1"), ("r0", "r0")):
        engine = bench.engine(AMPLE_ROOM, {"enable_prefix_caching": True})
        found = [bench.compare(bench.run(engine, [name]), [name]) for name in names]
        if engine.stats().cached_tokens:
            return worst_of(found)
    return Case(result=INERT, why="no prefix was found")


def _disk(bench: Bench) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        kv = {"enable_prefix_caching": True, "disk_memory": "64MiB", "disk_path": folder}
        for _ in range(2):
            engine = bench.engine(AMPLE_ROOM, {**kv, "kv_load": "whole"})
            found = bench.compare(bench.run(engine, ["r0"]), ["r0"])
            engine.close()
    tier = engine.stats().tier
    return (
        found
        if tier is not None and tier.loaded_tokens
        else Case(result=INERT, why="no prefix was loaded from the disk")
    )


def _forks(n: int) -> Callable[[Bench], Case]:
    """Sampled outputs of one prompt: their logits equal those of a scan over their tokens.

    Transformers' scan and its decode of the same tokens can differ by more than the tolerance,
    which is measured with other tokens; then they equal its decode.
    """

    def run(bench: Bench) -> Case:
        engine = bench.engine(AMPLE_ROOM, {"enable_prefix_caching": True})
        recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler, None)
        prompt = bench.expected["r0"].prompt
        sampled = {"n": n, "seed": 7, "temperature": 1.0}
        params = SamplingParams(**sampled, max_tokens=NEW_TOKENS, ignore_eos=True)
        output = outputs_of(engine, GenerationRequest(prompt, params, request_id="r0"))
        tokens = [list(choice.token_ids) for choice in output.choices]
        found = []
        for index, own in enumerate(tokens):
            name = f"r0#{index}" if index else "r0"
            theirs, ours = scan(bench.model, prompt, own), recorder.logits(name)
            if difference(ours, theirs) > bench.tolerance:
                theirs = decode(bench.model, prompt, len(own), given=own).logits
            worst, limit = difference(ours, theirs), bench.tolerance
            why = "" if worst <= limit else first_difference(name, ours, theirs)
            found.append(Case(result=FAILED if why else EQUAL, why=why, worst=worst))
        if tokens.count(tokens[0]) == n:
            return Case(result=INERT, why="all outputs are equal")
        return worst_of(found)

    return run


def _beams(bench: Bench) -> Case:
    """The scores of beams, in the order of a search that scans each sequence from its begin."""
    engine, prompt = bench.engine(AMPLE_ROOM), bench.expected["r0"].prompt
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=BEAM_TOKENS, ignore_eos=True)
    output = outputs_of(engine, GenerationRequest(prompt, params))
    scale = bench.expected["r0"].logits.abs().max()
    scores = Tensor([choice.score for choice in output.choices])
    expected = beam_scores(bench.model, prompt, len(scores), BEAM_TOKENS)
    worst = float((scores - expected).abs().max() / scale)
    if worst <= 2 * bench.tolerance:  # a log-probability subtracts two numbers
        return Case(worst=worst)
    why = f"scores are {scores.tolist()}, not {expected.tolist()}"
    return Case(result=FAILED, why=why, worst=worst)


def outputs_of(engine: Engine, request: GenerationRequest) -> RequestOutput:
    """The whole output of a request that runs alone."""
    builder = OutputBuilder(engine.submit(request), tuple(request.prompt))
    found = None
    while engine.has_work:
        for delta in engine.step():
            found = builder.add(delta) or found
    engine.check()
    assert found is not None
    return found


def _with_plain_backend(
    kv: Mapping[str, object], acted: Callable[[Engine], bool] = lambda engine: True
) -> Callable[[Bench], Case]:
    """Compare with `attention="reference"`, both with the tokens of Transformers."""

    def run(bench: Bench) -> Case:
        engines = [
            bench.engine(AMPLE_ROOM, {**kv, "attention": name}) for name in ("auto", "reference")
        ]
        ours, plain = (bench.run(engine) for engine in engines)
        if not all(map(acted, engines)):
            return Case(result=INERT, why="no token was evicted")
        moved = {
            name: [
                difference(a[None], b[None])
                for a, b in zip(ours.logits(name), plain.logits(name), strict=True)
            ]
            for name in bench.expected
        }
        worst = max(map(max, moved.values()))
        if worst <= CODED_TOLERANCE and min(map(median, moved.values())) <= TOLERANCE:
            return Case(worst=worst)
        name = max(moved, key=lambda name: max(moved[name]))
        why = first_difference(name, ours.logits(name), plain.logits(name))
        return Case(result=FAILED, why=why, worst=worst)

    return run


CASES: Mapping[str, Callable[[Bench], Case]] = {
    "ample": _chunks(512),  # the whole prompt
    "tight": partial(_preempted, swap=False),
    "chunks of 7": _chunks(7),
    "chunks of 64": _chunks(64),
    "prefix": _prefix,
    "swap": partial(_preempted, swap=True),
    "n=2": _forks(2),
    "n=4": _forks(4),
    "beams": _beams,
    "disk": _disk,
    "chunks of 1": _chunks(1),
    "int8": _with_plain_backend({"codec": "int8"}),
    **{
        name: _with_plain_backend({"evict": rule}, lambda engine: engine.stats().num_evictions > 0)
        for name, rule in RULES.items()
    },
}
OF_STATES = ("n=4", "beams", "disk", "chunks of 1")  # cases of types with recurrent states only
PLAIN = ("int8", *RULES)
"""Cases that are compared with the plain backend; the others with Transformers."""
