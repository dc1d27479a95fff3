"""Every codec x rule x granularity of the registries: allowed or rejected, and equal.

New codecs and rules are included automatically. `undisturbed` runs each request alone in
ample memory. It is compared with chunked prefill in a batch, with requests that are swapped or
recomputed after evictions: retained tokens are equal, logits within 1e-4.

Products are exact (tests/support/exact_products.py), so equal codes give equal logits.
"""

from collections import Counter
from contextlib import nullcontext
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from quire.codecs.fp8 import Float8
from quire.codecs.registry import registered as registered_codecs
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.eviction.calibration import measure, read_vectors
from quire.kv.coded_layers import write_constants
from quire.kv.step import StepAttention
from quire.kv.swap import append_tail, can_split, swap_out
from quire.layout.codec_names import CODECS
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.layout.kv_format import read_format
from quire.policies.eviction import GRANULARITIES, PAGE, TOKEN, make_eviction
from quire.policies.registry import registered
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction_engine import Run, loaded, run
from reference.test_eviction_matrix import Case
from support.engines import greedy, largest_difference, load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

LOSSY = [name for name, codec in CODECS.items() if not codec.is_plain]
MODELS = ("qwen3", "gemma2", "deepseek_v3")  # the second has windows, the third latents
PROMPTS = {"a": [5, 9, 2, 7] * 11, "b": [3 + i * i % 60 for i in range(55)]}
CAP = 44  # leaves room for all that any rule protects, pages of 4 tokens included


def rule_of(policy: str, granularity: str) -> str | None:
    """A rule with a small cap; None if the rule does not support the granularity."""
    case = Case(policy, granularity, PREFILL_AND_DECODE)
    return case.with_cap(CAP) if case.is_sound else None


SOUND = [(p, g) for p, g in product(registered(), GRANULARITIES) if rule_of(p, g)]
REROTATES = {p for p, g in SOUND if make_eviction(rule_of(p, g)).policy.rerotates_keys}


def goes(codec: str, policy: str) -> bool:
    """Whether the combination is allowed, written independently of the engine."""
    # measured constants are those of keys after RoPE
    return policy not in REROTATES or not CODECS[codec].constants


_folders: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def _measured(tmp_path_factory):
    """Constants of the codecs that need them, for all models."""
    for model in MODELS:
        vectors = read_vectors(loaded(model).decoder, [2 + i * i % 61 for i in range(300)])
        folder = tmp_path_factory.mktemp(model)
        for form in (read_format(name) for name in LOSSY if CODECS[name].constants):
            write_constants(folder, form, measure(vectors, form), {})
        _folders[model] = str(folder)


def constants_of(codec: str, model: str) -> str:
    """The option that names their folder; no option for codecs without constants."""
    known = CODECS.get(codec.partition("+")[0])
    return _folders[model] if known is not None and known.constants else ""


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield


def answer(codec: str, rule: str, model: str = MODELS[0], **options) -> Run:
    kv = {"codec": codec, "constants": constants_of(codec, model), "enable_prefix_caching": False}
    jobs = {name: (prompt, rule) for name, prompt in PROMPTS.items()}
    return run(jobs, model=model, kv=kv | {"evict": rule, "evict_allow": ""}, **options)


@cache
def undisturbed(codec: str, rule: str, model: str) -> Run:
    return answer(codec, rule, model, max_num_seqs=1)


# ---- allowed or refused --------------------------------------------------------------------------


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_is_allowed_with_all_rules_except_those_it_excludes(codec, every):
    """Rejected at start, with the reason and an alternative."""
    found = Counter()
    pairs = sorted(SOUND, key=lambda pair: goes(codec, pair[0]))
    for policy, granularity in pairs[LOSSY.index(codec) % every :: every]:
        kv = {"memory": "8MiB", "page_tokens": 4, "constants": constants_of(codec, MODELS[0])}
        rule, wanted = rule_of(policy, granularity), goes(codec, policy)
        config = kv_config(codec=codec, evict=rule, evict_allow="", **kv)
        found[wanted] += 1
        refused = pytest.raises(UnsoundCombination, match="; use ")
        with nullcontext() if wanted else refused:
            Engine(loaded(MODELS[0]), config, ScheduleConfig(max_num_seqs=4))
    assert found[True]
    assert bool(found[False]) == any(not goes(codec, policy) for policy, _ in pairs)


def cells() -> list:
    """Each codec with each allowed rule; a few of them are fast."""
    return [
        pytest.param(
            *(codec, policy, granularity),
            id=f"{codec}-{policy}-{granularity}",
            marks=[pytest.mark.slow] * (number % 127 > 0),
        )
        for number, (codec, (policy, granularity)) in enumerate(product(LOSSY, SOUND))
        if goes(codec, policy)
    ]


def disturbed(preempt: str) -> dict:
    """Options of a run with chunks that are batched, and with preemption."""
    steps = {"chunk_tokens": 7, "max_num_batched_tokens": 20}
    return steps | {"host": "4MiB" if preempt == "swap" else 0, "preempt": preempt, "preempts": 1}


@pytest.mark.parametrize(("codec", "policy", "granularity"), cells())
def test_batching_and_preemption_change_no_logits(codec, policy, granularity):
    """With and without layers that have windows, and with latents."""
    rule = rule_of(policy, granularity)
    turn = LOSSY.index(codec) + SOUND.index((policy, granularity))
    on_latents = not make_eviction(rule).policy.not_on_latents
    for number, model in enumerate(MODELS if on_latents else MODELS[:2], start=turn):
        other = answer(codec, rule, model, **disturbed(("swap", "recompute")[number % 2]))
        expected = undisturbed(codec, rule, model)
        assert other.traces() == expected.traces()
        # a chunk rotates the keys of its window to other places: last bits, which decide codes
        shifts = policy in REROTATES and model == MODELS[1]
        assert largest_difference(other.logits, expected.logits) <= (2e-3 if shifts else 1e-4)
        evicted = any(usage.evicted_tokens for usage in expected.usages.values())
        assert evicted == any(usage.preemptions for usage in other.usages.values())


@pytest.mark.parametrize("codec", ["int8", "int4_outliers", "int4+residual=6", "int4_page"])
@pytest.mark.parametrize("evict", ["full", "h2o:cap=63,every=5", "snapkv:window=7,cap=63,every=5"])
def test_a_recomputed_head_precedes_a_swapped_tail(codec, evict):
    """The first 16 of about 60 tokens are recomputed; the codes after them are swapped in.

    So are statistics and full-precision windows, as a whole. After the first eviction at 63 tokens
    the request is not split.
    """
    prompt, kv = PROMPTS["b"], {"codec": codec, "evict": evict, "evict_allow": ""}
    kv |= {"enable_prefix_caching": False}
    expected = run({"r": (prompt, evict)}, model="qwen3", kv=kv)
    splits = []

    def split(engine: Engine) -> None:
        memory = engine.pool.kv.memory
        for request in engine.scheduler.running:
            length = int(memory.lengths[request.memory.row])
            if request.num_uncomputed > 1 or not can_split(memory, request.memory.row, 16):
                continue
            swapped = swap_out(memory, [request.memory.row], keep_from=16)
            engine.pool.kv.store.arena.fill_(0xFF)
            request.memory.row = memory.start(request.memory.statistics)
            request.progress.num_computed = 0
            engine.step()
            append_tail(memory, request.memory.row, swapped)
            request.progress.num_computed = length
            splits.append(length)

    other = run({"r": (prompt, evict)}, model="qwen3", kv=kv, chunk_tokens=16, before_step=split)

    assert len(splits) == (13 if evict == "full" else 9)
    assert largest_difference(other.logits, expected.logits) <= 1e-4


# ---- layers in full precision ----------------------------------------------------------------


PLAIN_LAYERS = [
    ("int8+plain_layers=1", "h2o:cap=44,every=5", "swap"),
    ("int4_page+plain_layers=1", "recent:cap=44,every=5", "recompute"),
    ("int4+residual=6+plain_layers=1", "snapkv:window=5,cap=44,every=5,budget=pyramid", "swap"),
    ("int4+plain_layers=1", "h2o:cap=44,every=5,budget=ada", "recompute"),
    ("int8+plain_layers=1", "average:cap=44,every=5,when=decode,budget=squeeze", "swap"),
    ("int2+residual=6+promoted=4:int4+plain_layers=1", "h2o:cap=44,every=5", "recompute"),
    ("int2+residual=6+promoted=4:int4+plain_layers=1", "keydiff:cap=44,every=5", "swap"),
    ("int8+plain_layers=1", "streaming:cap=44,every=5", "recompute"),
    ("int8+plain_layers=1", "h2o:cap=44,every=8,granularity=page", "swap"),
    ("int4_page/int4+plain_layers=1", "kvcrush:cap=44,every=5,base=h2o", "recompute"),
]


four_layers = cache(lambda: load("qwen3", times=2))


def deep(codec: str, rule: str, *, host: int | str = 0, preempts: int = 0, **schedule) -> Run:
    kv = {"codec": codec, "evict": rule, "evict_allow": "", "enable_prefix_caching": False}
    config = kv_config(memory="8MiB", page_tokens=4, swap_space=host, record_evictions=True, **kv)
    engine = Engine(four_layers(), config, ScheduleConfig(**schedule))
    jobs = {name: (prompt, rule) for name, prompt in PROMPTS.items()}
    return run(jobs, engine=engine, preempts=preempts)


@pytest.mark.parametrize(("codec", "rule", "preempt"), PLAIN_LAYERS)
def test_layers_in_full_precision_evict_as_the_others(codec, rule, preempt):
    """Four layers, the first and the last in full precision: two lane groups under one rule."""
    expected, other = deep(codec, rule, max_num_seqs=1), deep(codec, rule, **disturbed(preempt))

    groups = {g.name: g.layers for g in other.engine.pool.kv.memory.layout.groups if not g.private}
    assert groups == {"full": (1, 2), "full.plain": (0, 3)}
    assert other.traces() == expected.traces()
    assert largest_difference(other.logits, expected.logits) <= 1e-4
    assert any(usage.evicted_tokens for usage in other.usages.values())
    for sets in other.traces().values():
        assert all(len(lanes) in (4, 4 * 2) for _, lanes in sets)


def test_the_same_tokens_remain_whether_layers_are_quantized_or_not():
    """`recent` reads no numbers: both groups retain what one group of all layers retains."""
    rule = "recent:cap=44,every=5,budget=pyramid"

    together, apart = deep("int8", rule), deep("int8+plain_layers=1", rule)

    assert apart.traces() == together.traces()


# ---- each token is encoded once ------------------------------------------------------------------


class Encoders:
    """Counts the vectors that codecs encode, and checks that the model computed each.

    Args:
        patch: undone at the end of the test.
        residuals: codec of records, which encode what other codes lost; counted only.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, residuals: str = "") -> None:
        self.vectors, self.residuals = 0, residuals
        self.made: list[torch.Tensor] = []
        for cls in set(registered_codecs().values()):
            patch.setattr(cls, "encode", self._counted(cls.encode))
        attend = StepAttention.attend

        def attending(step, layer, math, query, key, value, *rest, **options):
            self.made += [key.detach().clone(), value.detach().clone()]
            return attend(step, layer, math, query, key, value, *rest, **options)

        patch.setattr(StepAttention, "attend", attending)

    def _counted(self, encode):
        def counted(codec, vectors):
            self.vectors += vectors[..., 0].numel()
            if codec.spec.name != self.residuals:
                known = torch.cat([x.reshape(-1, x.shape[-1]) for x in self.made])
                flat = vectors.reshape(-1, vectors.shape[-1])
                assert (flat[:, None] == known).all(dim=-1).any(dim=-1).all()  # bit-equal
            return encode(codec, vectors)

        return counted


ONCE = [*(name for name in LOSSY if not CODECS[name].per_page), "int4+sinks=2+residual=6"]


ENCODED = [  # each codec is preempted in both ways; one of them is fast
    pytest.param(codec, preempt, marks=[pytest.mark.slow] * (number % 4 not in (0, 3)))
    for number, (codec, preempt) in enumerate(product(ONCE, ("swap", "recompute")))
]


@pytest.mark.parametrize(("codec", "preempt"), ENCODED)
def test_a_token_is_encoded_once_from_full_precision(codec, preempt, monkeypatch):
    """Key and value of two heads in two layers, for each processed token and no other."""
    seen = Encoders(monkeypatch)
    host = "4MiB" if preempt == "swap" else 0

    done = answer(codec, rule_of("h2o", TOKEN), host=host, preempt=preempt, preempts=2)

    assert all(usage.preemptions == 2 for usage in done.usages.values())
    assert seen.vectors == 2 * 2 * 2 * done.engine.stats().num_processed_tokens
    read_once = sum(len(prompt) + 13 for prompt in PROMPTS.values())
    assert (done.engine.stats().num_processed_tokens > read_once) == (preempt == "recompute")


@pytest.mark.parametrize("codec", [name for name in LOSSY if CODECS[name].per_page])
def test_a_page_is_encoded_once_when_it_is_full(codec, monkeypatch):
    seen = Encoders(monkeypatch)

    done = answer(codec, rule_of("h2o", PAGE), host="4MiB", preempt="swap", preempts=2)

    assert all(usage.preemptions == 2 for usage in done.usages.values())
    pages = sum((len(prompt) + 13) // 4 for prompt in PROMPTS.values())
    assert seen.vectors == 2 * 2 * 2 * 4 * pages


@pytest.mark.parametrize("codec", ["int8", "int2_page/int4_page", "int4+residual=5"])
def test_tokens_of_shared_prefixes_and_forks_are_encoded_once(codec, monkeypatch):
    seen = Encoders(monkeypatch)
    kv = {"codec": codec, "evict_allow": "", "enable_prefix_caching": True}
    jobs = {f"r{i}": ([*PROMPTS["b"][:40], 5 + i], "full") for i in range(3)}
    done = run(jobs, model="qwen3", kv=kv, max_num_seqs=1)

    assert sum(usage.cached_tokens for usage in done.usages.values()) == 2 * 40
    tokens = done.engine.stats().num_processed_tokens
    assert tokens == 3 * (41 + 13) - 2 * 40
    written = 40 + 3 * (14 // 4 * 4) if "_page" in codec else tokens
    assert seen.vectors == 2 * 2 * 2 * written


# ---- prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "int4:group=8", "int8+residual=4", "none/int8"])
def test_prefix_keys_depend_on_the_codec(codec):
    roots = []
    for text in (codec, "none", "int4", codec):
        engine = Engine(loaded("qwen3"), KVConfig(memory="1MiB", codec=text), ScheduleConfig())
        engine.submit(GenerationRequest(PROMPTS["a"], greedy(2), request_id="r"))
        engine.step()
        [request] = engine.scheduler.running
        roots.append(engine.scheduler.sequence_memory.identities.of(request).root)
    assert roots[0] == roots[3]
    assert len(set(roots)) == 3


# ---- tokens promoted to a finer codec ------------------------------------------------------------


RECORDS, EVERY = 5, 8
CODEC = f"int2+residual={EVERY}+promoted={RECORDS}:int8"
RULE = f"h2o:cap=30,every={EVERY}"


def mixed(rule: str = RULE, codec: str = CODEC, *, prompts=PROMPTS, **options) -> Run:
    kv = {"codec": codec, "evict": rule, "evict_allow": "", "enable_prefix_caching": False}
    kv |= options.pop("kv", {})
    jobs = {name: (prompt, rule) for name, prompt in prompts.items()}
    return run(jobs, model="qwen3", kv=kv, **options)


def promoted(done: Run) -> dict[str, list]:
    """For each request and eviction, the tokens of each lane that have a record."""
    traces = {name: done.engine.eviction_trace(name) for name in done.usages}
    return {n: [[p.tolist() for p in sets.promoted] for sets in traces[n]] for n in traces}


def preempted_rules() -> list:
    """Each rule, by token and by page, preempted in both ways; half with a body of whole pages.

    One rule of nine is fast, in one of the ways.
    """
    found = []
    rules = [(p, g, rule_of(p, g)) for g in ("token", "page") for p in registered()]
    for number, (policy, granularity, rule) in enumerate(one for one in rules if one[2]):
        for turn, preempt in enumerate(("swap", "recompute")):
            marks = [pytest.mark.slow] * (number % 9 > 0 or number % 2 != turn)
            body, name = ("int2", "int2_page")[(number + turn) % 2], f"{policy}-{granularity}"
            found.append(pytest.param(rule, body, preempt, id=f"{name}-{preempt}", marks=marks))
    return found


@pytest.mark.parametrize(("rule", "body", "preempt"), preempted_rules())
def test_a_preempted_request_promotes_the_same_tokens(rule, body, preempt):
    residual = make_eviction(rule).every
    codec = CODEC.replace(f"residual={EVERY}", f"residual={residual}").replace("int2", body)
    expected, other = mixed(rule, codec, max_num_seqs=1), mixed(rule, codec, **disturbed(preempt))
    assert all(usage.preemptions for usage in other.usages.values())
    assert other.traces() == expected.traces()
    assert promoted(other) == promoted(expected)
    assert any(lane for found in promoted(expected).values() for lane in found[-1])
    assert largest_difference(other.logits, expected.logits) <= 1e-4


def test_tokens_are_promoted_once_and_never_demoted():
    """A record is freed when its token is evicted; only tokens of the residual are promoted."""
    done = mixed()

    for name in PROMPTS:
        sets = done.engine.eviction_trace(name)
        for before, after in pairwise(sets):
            for lane in range(len(after.retained)):
                kept, old, new = (
                    set(x.tolist())
                    for x in (after.retained[lane], before.promoted[lane], after.promoted[lane])
                )
                assert old & kept <= new <= kept
                assert len(new) <= RECORDS
                assert all(p >= after.num_computed - EVERY for p in new - old)


def test_the_tokens_with_the_highest_scores_are_promoted(monkeypatch):
    """The scores of `keydiff` depend only on the current keys, so the test recomputes them."""
    seen, rule, checked = [], f"keydiff:cap=30,every={EVERY}", 0
    policy = type(make_eviction(rule).policy)
    score = policy.score

    def scoring(rule, view):
        found = score(rule, view)
        seen.append((view.positions.clone(), view.next_position, found.clone()))
        return found

    monkeypatch.setattr(policy, "score", scoring)
    sets = mixed(rule, prompts={"r": PROMPTS["b"]}).engine.eviction_trace("r")
    at = {one.num_computed: (number, one) for number, one in enumerate(sets)}
    for positions, num_computed, scores in seen:
        number, now = at[num_computed]
        for lane, (kept, promoted) in enumerate(zip(now.retained, now.promoted, strict=True)):
            old = set(sets[number - 1].promoted[lane].tolist()) if number else set()
            new = set(promoted.tolist()) - old
            candidates = {p for p in kept.tolist() if p >= num_computed - EVERY} - old
            of = dict(zip(positions[lane].tolist(), scores[lane].tolist(), strict=True))
            assert new <= candidates
            if new:
                assert all(of[p] <= min(of[q] for q in new) for p in candidates - new)
                checked += len(candidates - new)
    assert checked


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_promoted_token_is_encoded_once_more_from_full_precision(preempt, monkeypatch):
    """Body and record, key and value, two heads, two layers; bodies never from decoded values."""
    seen = Encoders(monkeypatch, residuals="int8")
    host = "4MiB" if preempt == "swap" else 0

    done = mixed(host=host, preempt=preempt, preempts=2)

    recorded = done.engine._traces._recorded
    promoted = sum(entry.promoted.num_slots for name in PROMPTS for entry in recorded[name])
    heads_of_lane = 2 * 2 // len(done.engine.eviction_trace("a")[0].retained)
    bodies = 2 * 2 * 2 * done.engine.stats().num_processed_tokens
    if preempt == "swap":
        assert seen.vectors == bodies + 2 * heads_of_lane * promoted
    else:  # evictions are played again, with the same tokens raised
        assert seen.vectors > bodies + 2 * heads_of_lane * promoted


def test_sinks_need_no_record_and_records_are_counted_in_bytes():
    """The six first tokens in full precision; all six are in a window of 28."""
    sinks, first = 6, 30 - 28
    done = mixed(codec=f"int2+sinks={sinks}+residual=28+promoted={RECORDS}:int8")
    records = [lane for found in promoted(done).values() for lanes in found for lane in lanes]
    assert first < sinks
    assert any(records)
    assert all(min(lane, default=sinks) >= sinks for lane in records)

    # for 2 layers x 2 lanes a page of 5 records: codes, scales, positions
    plain = mixed(codec=f"int2+residual={EVERY}")
    finer = mixed()
    [group] = [g for g in finer.engine.pool.kv.memory.layout.groups if g.promoted is not None]

    for name in PROMPTS:
        more = finer.usages[name].kv_peak_bytes - plain.usages[name].kv_peak_bytes
        assert more == group.num_lanes * group.page_class.page_bytes
    vector = RECORDS * group.page_class.heads * (group.page_class.head_dim + 2)
    least = 2 * vector + 4 * RECORDS
    assert least <= group.page_class.page_bytes < least + 256


def engine_of(**kv) -> Engine:
    return Engine(load("qwen3"), kv_config(memory="8MiB", **kv), ScheduleConfig())


def test_promotion_without_a_timely_rule_is_rejected(monkeypatch):
    with pytest.raises(UnsoundCombination, match="eviction is off; use --evict with a rule"):
        engine_of(codec=CODEC)
    late = f"h2o:cap=30,every={EVERY + 1}"
    with pytest.raises(UnsoundCombination, match=r"before the rule scores them.*; use residual="):
        engine_of(codec=CODEC, evict=late)
    request = GenerationRequest(PROMPTS["a"], greedy(2), evict=late.replace("30", "40"))
    with pytest.raises(RequestError, match=r"every=.*, or a smaller every"):
        engine_of(codec=CODEC, evict=RULE).submit(request)
    monkeypatch.setattr(Float8, "why_not", classmethod(lambda cls, device: "no such type"))
    with pytest.raises(ConfigError, match="cannot run on cpu: no such type; use int8"):
        engine_of(codec=CODEC.replace("int8", "int8/fp8"), evict=RULE)


def test_a_shared_prefix_has_no_promoted_records():
    """Later requests share pages of codes and promote tokens independently."""
    prompts = {f"r{i}": PROMPTS["b"][:24] + [9 + i] * 20 for i in range(3)}
    shared, alone = (
        mixed(prompts=prompts, kv={"enable_prefix_caching": caching}, max_num_seqs=1)
        for caching in (True, False)
    )
    assert shared.traces() == alone.traces()
    assert largest_difference(shared.logits, alone.logits) <= 1e-4
    assert promoted(shared) == promoted(alone)
