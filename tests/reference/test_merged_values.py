"""Values of evicted tokens merged into retained ones: pages, codecs, sharing, preemption."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import RequestError, UnsoundCombination
from quire.hf import QuireCache
from quire.kv.lane_reader import LaneReader
from quire.policies.eviction import Eviction
from reference.test_eviction import largest_difference
from reference.test_eviction_engine import Run, loaded, run
from support import zoo
from support.engines import greedy

CAP, EVERY = 32, 6
PROMPTS = {"a": [3 + i * i % 60 for i in range(95)], "b": [5 + i % 7 for i in range(70)]}
PIECES = {
    "token": "",
    "chunk": ",granularity=chunk,chunk_tokens=2",
    "page": ",granularity=page",
}
sets_and_pieces = [(sets, piece) for sets in ("layer", "head") for piece in PIECES]


def rule_of(sets: str, piece: str = "token", when: str = "prefill_and_decode") -> str:
    own = f"base=(h2o:recent=3),sets={sets},share=0.5,pick=best,merge=values"
    return f"kvcrush:{own},cap={CAP},every={EVERY},when={when}{PIECES[piece]}"


def run_all(rule: str, **options: object) -> Run:
    jobs = {name: (prompt, rule) for name, prompt in PROMPTS.items()}
    kv = {"evict": rule, "evict_allow": ""} | options.pop("kv", {})
    return run(jobs, kv=kv, **options)


@pytest.fixture
def decisions(monkeypatch):
    """Every decision of a rule, with the positions of its view."""
    found = []
    decide = Eviction.decide

    def recorded(self, view, keep):
        decision = decide(self, view, keep)
        found.append((view.layers, view.positions, decision))
        return decision

    monkeypatch.setattr(Eviction, "decide", recorded)
    return found


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 0.0), ("int8", 0.02), ("int4", 0.3)])
@pytest.mark.parametrize(("sets", "piece"), sets_and_pieces)
def test_pages_hold_the_merged_values_after_an_eviction(decisions, sets, piece, codec, tolerance):
    """The values of retained tokens, read back by position; other values stay."""
    rule = rule_of(sets, piece, "prefill_end")
    config = KVConfig(memory="4MiB", evict=rule, page_tokens=4, codec=codec)
    engine = Engine(loaded("llama"), config)
    engine.submit(GenerationRequest(PROMPTS["a"], greedy(6), request_id="a"))
    kv = engine.pool.kv

    def values() -> dict[tuple[int, int], torch.Tensor]:
        reader = LaneReader(kv, "full", engine.scheduler.running[0].memory.row)
        pairs = enumerate(zip(reader.positions.tolist(), reader.values(), strict=True))
        return {
            (lane, position): value
            for lane, (positions, values) in pairs
            for position, value in zip(positions, values, strict=True)
            if position >= 0
        }

    before = {}
    while not decisions:
        if engine.scheduler.running:
            before = values()
        engine.step()
    after, first, merged = values(), 0, 0
    for _, positions, decision in decisions:
        rows = iter(decision.merged.values)
        for lane, (tokens, slots) in enumerate(
            zip(positions.tolist(), decision.merged.slots.tolist(), strict=True), start=first
        ):
            for token, new in zip(tokens, slots, strict=True):
                if new:
                    difference = (after[lane, token] - next(rows)).abs().max()
                    assert float(difference) <= tolerance
                    merged += 1
                elif (lane, token) in after and (lane, token) in before:
                    assert torch.equal(after[lane, token], before[lane, token])
        first += len(positions)
    assert merged
    engine.check()


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize(("sets", "piece"), sets_and_pieces)
def test_a_preempted_request_continues_with_its_merged_values(sets, piece, preempt):
    rule = rule_of(sets, piece)
    plain = run_all(rule)
    host = "4MiB" if preempt == "swap" else 0
    often = run_all(rule, host=host, preempt=preempt, preempts=2)

    assert sum(usage.preemptions for usage in often.usages.values()) > 0
    assert often.traces() == plain.traces()
    assert largest_difference(plain.logits, often.logits) <= 1e-4


def test_merging_changes_the_logits():
    rule = rule_of("head")
    merged, dropped = run_all(rule), run_all(rule.replace("merge=values", "merge=none"))

    assert merged.traces()["a"][0] == dropped.traces()["a"][0]
    assert largest_difference(merged.logits, dropped.logits) > 1e-3


@pytest.mark.parametrize("sets", ["layer", "head"])
def test_cached_prefixes_of_other_requests_keep_their_values(sets):
    """A merged token may lie in a page that the prefix cache shares: the page is copied first."""
    rule = rule_of(sets, when="prefill_end")
    config = KVConfig(memory="8MiB", evict="full", evict_allow=rule, page_tokens=4)
    engine = Engine(loaded("llama"), config)

    def generate(name: str, evict: str) -> Run:
        return run({name: (PROMPTS["a"], evict)}, engine=engine)

    first = generate("first", "full").logits["first"]
    generate("merging", rule)
    again = generate("again", "full").logits["again"]

    assert largest_difference({"r": first}, {"r": again}) <= 1e-4


@pytest.mark.parametrize("codec", ["int4_page", "int8+residual=8", "int8+sinks=2"])
def test_codecs_with_shared_scales_or_copies_are_refused(codec):
    rule = rule_of("layer", "page").replace(f"cap={CAP}", "cap=150")
    with pytest.raises(UnsoundCombination, match="use merge=none"):
        Engine(loaded("llama"), KVConfig(memory="4MiB", evict=rule, codec=codec))
    config = KVConfig(memory="4MiB", evict=rule.replace("merge=values", "merge=none"), codec=codec)
    engine = Engine(loaded("llama"), config)
    with pytest.raises(RequestError, match="use merge=none"):
        engine.submit(GenerationRequest([5] * 60, greedy(), evict=rule))


@pytest.mark.parametrize("sets", ["layer", "head"])
def test_rows_in_transformers_continue_with_merged_values(sets):
    """The logits of generate equal those of the engine."""
    rule = rule_of(sets)
    expected = run_all(rule).logits
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    for name, prompt in PROMPTS.items():
        with QuireCache(model, rule, page_tokens=4, verify=False) as cache:
            output = model.generate(
                torch.tensor([prompt]),
                past_key_values=cache,
                max_new_tokens=len(expected[name]),
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        found = [row[0] for row in output.logits]
        assert largest_difference({"r": expected[name]}, {"r": found}) <= 1e-3
