"""Speculative decoding: outputs are those without, and the KV of wrong proposals is dropped."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import ClassVar

import pytest
from scipy.stats import chi2_contingency

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError, UnknownName, UnsoundCombination
from quire.models.drafted import with_draft
from quire.scheduler import speculation
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.speculation import DraftLengths, Lookup, Proposals, parse_speculative
from support.engines import answer, load, requests_of
from support.kv_options import kv_config

RULE = "ngram:tokens=5,min=1,max=3"
FEW = [9, 3, 9, 4, 9, 3]
PROMPTS = {
    "loop": [5, 6, 7, 8] * 9,
    "few": [9, 3, 9, 4, 9, 3],
    "text": [i * i % 60 for i in range(50)],
}
SUFFIX = "suffix:tokens=6,depth=5,factor=2"
DRAFT = "draft:model=beside,tokens=3"
loaded = cache(load)


def engine_of(architecture="llama", *, rule=RULE, memory="4MiB", schedule=(), draft="qwen2", **kv):
    model = loaded(architecture)
    return Engine(
        with_draft(model, loaded(draft)) if rule.startswith("draft") else model,
        kv_config(memory=memory, page_tokens=4, **kv),
        ScheduleConfig(chunk_tokens=16, speculative=rule, **dict(schedule)),
    )


@pytest.fixture
def verifies_all(monkeypatch):
    """Lengths do not depend on times."""
    monkeypatch.setattr(
        DraftLengths, "choose", lambda self, rows, proposed: [n for _, n in proposed]
    )


CASES = {
    "plain": {},
    "joint products": {"architecture": "gpt_neox"},
    "windows": {"architecture": "mistral"},
    "window layers": {"architecture": "gemma3"},
    "chunked attention": {"architecture": "llama4"},
    "latent attention": {"architecture": "deepseek_v3"},
    "shared KV": {"architecture": "gemma3n"},
    "ALiBi": {"architecture": "bloom"},
    "gathered": {"attention": "gathered"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "evicted prompt": {"evict": "snapkv:window=4,cap=16,when=prefill_end"},
    "heads apart": {"evict": "keydiff:cap=16,when=prefill_end"},
    "prefix cache": {"enable_prefix_caching": True},
    "batch-invariant": {"schedule": {"batch_invariant": True}},
    "few tokens a step": {"schedule": {"max_num_batched_tokens": 17}},
    "a batcher": {"schedule": {"batcher": "static", "max_num_seqs": 2}},
    "full-precision tokens": {"codec": "int8+residual=8"},
    "two precisions": {"codec": "int4+residual=6"},
    "whole pages": {"codec": "int4_page"},
    "states": {"architecture": "bamba"},
    "states and prefix cache": {"architecture": "qwen3_next", "enable_prefix_caching": True},
    "evicts oldest": {"evict": "recent:cap=16,every=6"},
    "evicts by scores": {"evict": "h2o:cap=16,every=6"},
    "evicts by queries": {"evict": "snapkv:window=4,cap=16,every=6,when=prefill_and_decode"},
    "suffixes": {"rule": SUFFIX},
    "draft model": {"rule": DRAFT},
    "draft model with windows": {"rule": DRAFT, "draft": "gemma3"},
    "draft model beside states": {"rule": DRAFT, "architecture": "bamba"},
    "draft model, evicted prompt": {
        "rule": DRAFT,
        "evict": "snapkv:window=4,cap=16,when=prefill_end",
    },
    "draft model, evicts": {"rule": DRAFT, "evict": "h2o:cap=16,every=6"},
    "draft model, int8": {"rule": DRAFT, "codec": "int8", "enable_prefix_caching": True},
    "draft model, batch-invariant": {"rule": DRAFT, "schedule": {"batch_invariant": True}},
}
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3, "logprobs": 2},
    "penalties": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "min_p": 0.05},
    "several": {"n": 2, "temperature": 1.0, "seed": 5},
    "stops": {"stop_token_ids": tuple(range(20))},
}


class NearlyRight(Lookup):
    """Proposes what follows in known texts, with one wrong token in five."""

    known: ClassVar[list[list[int]]] = []

    def propose(self, new_tokens, count):
        found = super().propose(new_tokens, count)
        self.seen = [*getattr(self, "seen", ()), *new_tokens]
        done = self.num_tokens
        for text in self.known:
            if text[:done] == self.seen:
                return [text[i] ^ (i % 5 == 4) for i in range(done, min(done + count, len(text)))]
        return found


def both(options, params, prompts=PROMPTS, **changes):
    """The answers without and with proposals, and the engine with them."""
    found, own = [], options.get("rule", RULE)
    for rule in ("off", own):
        engine = engine_of(**options | (changes if rule == own else {}) | {"rule": rule})
        sampling = SamplingParams(**{"max_tokens": 24, "temperature": 0.0} | params)
        requests = [GenerationRequest(p, sampling, request_id=k) for k, p in prompts.items()]
        found.append(answer(engine, requests))
        engine.check()
        NearlyRight.known = [
            prompts[name] + list(tokens) for (name, _), tokens in found[-1].tokens.items()
        ]
    return *found, engine


@pytest.mark.parametrize("params", OPTIONS)
@pytest.mark.parametrize("options", CASES)
def test_outputs_are_those_without_proposals(options, params, verifies_all, monkeypatch):
    monkeypatch.setattr(speculation, "Lookup", NearlyRight)
    plain, got, engine = both(CASES[options], OPTIONS[params])

    assert got.tokens == plain.tokens
    stats, rule = engine.stats(), CASES[options].get("rule", RULE)
    if params == "greedy":
        assert stats.draft_tokens
        assert rule != RULE or stats.draft_tokens > stats.accepted_draft_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"architecture": "mistral", "draft": "mistral"},
        {"enable_prefix_caching": True},
        {"schedule": {"batch_invariant": True}},
        {"schedule": {"max_num_batched_tokens": 17}},
        {"memory": "120KiB", "swap_space": "0"},
        {"memory": "120KiB", "swap_space": "1MiB"},
        {"architecture": "deepseek_v3", "draft": "deepseek_v3"},
    ],
)
def test_a_draft_model_equal_to_the_model_is_right(options, verifies_all):
    """So its KV is that of the tokens: none is missing, double or of another request."""
    options = {"rule": DRAFT, "draft": "llama"} | options
    plain, got, engine = both(options, {"max_tokens": 17})
    assert got.tokens == plain.tokens
    stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 20


def test_a_fork_begins_with_the_sampled_tokens(verifies_all, monkeypatch):
    """Equal outputs of one prompt are forked where a decoding row ends the common tokens."""
    monkeypatch.setattr(speculation, "Lookup", NearlyRight)
    for room in ("24KiB", "28KiB", "36KiB"):
        params = {"n": 2, "max_tokens": 40, "temperature": 0.0}
        plain, got, _ = both({"swap_space": "0"}, params, memory=room)
        assert got.tokens == plain.tokens


@pytest.mark.parametrize("options", [{}, {"codec": "int8+residual=8"}])
def test_if_pages_are_short_the_first_requests_have_proposals(options, verifies_all, monkeypatch):
    tried, try_grow = [], SequenceMemory.try_grow

    def growing(self, requests, tokens, drafts=()):
        grown = try_grow(self, requests, tokens, drafts)
        tried.append((grown, [count > 0 for count in drafts]))
        return grown

    monkeypatch.setattr(speculation, "Lookup", NearlyRight)
    monkeypatch.setattr(SequenceMemory, "try_grow", growing)
    for kib in range(32, 52, 4):
        late = {"admission": "optimistic"}
        short = {"swap_space": "0", "memory": f"{kib}KiB", "schedule": late}
        plain, got, _ = both(options, {"max_tokens": 60}, **short)
        assert got.tokens == plain.tokens
    after = [(some, grown) for (failed, _), (grown, some) in pairwise(tried) if not failed]
    assert any(grown and any(some) and not all(some) for some, grown in after)


@pytest.mark.parametrize("options", [{}, {"architecture": "bamba"}, {"codec": "int8+residual=8"}])
@pytest.mark.parametrize("method", ["sample", "plan"])
def test_a_failed_step_forgets_its_proposals(options, method, verifies_all, monkeypatch):
    monkeypatch.setattr(speculation, "Lookup", NearlyRight)
    plain, _, _ = both(options, {})
    engine, failures = engine_of(**options), iter(range(1, 60))

    def failing(run):
        def fails(*arguments):
            if next(failures, 0) % 9 == 5:
                raise RuntimeError("device lost")
            return run(*arguments)

        return fails

    if method == "sample":
        sampler = engine.sampling_step.sampler
        monkeypatch.setattr(sampler, "sample", failing(sampler.sample))
    else:
        batcher = engine.scheduler.batcher
        monkeypatch.setattr(batcher, "prefill_tokens", failing(batcher.prefill_tokens))
    params, found = SamplingParams(max_tokens=24, temperature=0.0), dict[str, list[int]]()
    for name, prompt in PROMPTS.items():
        engine.submit(GenerationRequest(prompt, params, request_id=name))
    while engine.has_work:
        with suppress(RuntimeError):
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    engine.check()
    assert found == {name: tokens for (name, _), tokens in plain.tokens.items()}
    assert next(failures) > 9  # at least one step failed


def test_preempted_requests_and_little_memory_change_no_output(verifies_all):
    """A proposal that finds no pages is not verified; no request is preempted for it."""
    rooms = ("24KiB", "0", {}), ("24KiB", "1MiB", {}), ("40KiB", "0", {})
    more = {"codec": "int8+residual=8"}, {"architecture": "bamba"}, {"evict": "h2o:cap=16,every=6"}
    for room, swap, kv in (*rooms, *(("48KiB", "1MiB", kv) for kv in more)):
        options = {"swap_space": swap} | kv
        plain, got, engine = both(options, {"max_tokens": 40}, memory=room)
        assert got.tokens == plain.tokens
        assert engine.stats().draft_tokens


def test_sampled_tokens_have_the_distribution_of_the_model(verifies_all):
    """Of outputs with proposals, which are right or wrong, and of outputs without, by position."""
    counts = []
    for rule in ("off", RULE):
        engine, found, first = engine_of(rule=rule, memory="64MiB"), Counter(), len(counts) * 7**9
        for start in range(first, first + 5000, 200):
            params = [
                SamplingParams(max_tokens=4, temperature=2.0, seed=start + i) for i in range(200)
            ]
            requests = [
                GenerationRequest(FEW, one, request_id=str(i)) for i, one in enumerate(params)
            ]
            for tokens in answer(engine, requests).tokens.values():
                found.update((place, token % 8) for place, token in enumerate(tokens))
        counts.append(found)
    keys = sorted(counts[0].keys() | counts[1].keys())
    table = [[count[key] for key in keys] for count in counts]
    assert engine.stats().accepted_draft_tokens
    assert [sum(row) for row in table] == [20_000, 20_000]
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"offload_memory": "1MiB"}, "activations of proposed tokens"),
        ({"sparse": "quest:budget=50%,dense_layers=0"}, "verifies one token"),
        ({"rule": DRAFT, "draft": "bamba"}, "reads each proposed token twice"),
    ],
)
def test_what_cannot_be_taken_back_is_refused(kv, message):
    with pytest.raises(UnsoundCombination, match=message):
        engine_of(**kv)


def test_a_request_may_leave_it_out(verifies_all):
    engine = engine_of()
    answer(engine, requests_of({"a": PROMPTS["loop"]}, 8, speculative=False))
    assert not engine.stats().num_drafts
    with pytest.raises(RequestError, match="it is off"):
        engine_of(rule="off").submit(GenerationRequest([5], SamplingParams(), speculative=True))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("eagle:tokens=2", UnknownName, "ngram"),
        ("draft:tokens=2", ConfigError, "model=NAME"),
        ("suffix:depth=1", ConfigError, "depth of 2"),
        ("suffix:factor=0", ConfigError, "factor above 0"),
        ("suffix:min_probability=2", ConfigError, "from 0 to 1"),
        ("suffix:outputs=-1", ConfigError, "0 or more"),
        ("suffix:min=2", UnknownName, "depth"),
        ("ngram:tokens=0", ConfigError, "from 1 to 64"),
        ("ngram:tokens=x", ConfigError, "a whole number"),
        ("ngram:min=3,max=2", ConfigError, "min <= max"),
        ("ngram:top=3", UnknownName, "tokens"),
        ("off:tokens=3", ConfigError, "without options"),
        ('{"method": "eagle"}', ConfigError, '"draft_model"'),
        ('{"method": "ngram", "model": "x"}', UnknownName, "num_speculative_tokens"),
        ("{", ConfigError, "JSON"),
    ],
)
def test_invalid_rules_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        ScheduleConfig(speculative=text)


def test_json_of_vllm_has_the_same_meaning():
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    spec = parse_speculative(text)
    assert (spec.tokens, spec.min_match, spec.max_match) == (5, 2, 3)
    text = '{"method": "suffix", "suffix_decoding_min_token_prob": 0.2}'
    spec = parse_speculative(text)
    assert (spec.rule, spec.tokens, spec.max_match, spec.min_probability) == ("suffix", 16, 24, 0.2)
    text = '{"method": "draft_model", "model": "a/b", "num_speculative_tokens": 3}'
    spec = parse_speculative(text)
    assert (spec.rule, spec.model, spec.tokens) == ("draft", "a/b", 3)
    assert parse_speculative("off") is None


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 9, 2, 4, 1, 2], 3, [3, 9, 2]),  # the longer match, not the newest
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # of equal matches the newest
        ([7, 7, 7], 4, [7, 7, 7, 7]),  # beyond the end of the text
        ([1, 2, 3], 4, []),
        ([4], 4, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_proposed(text, count, expected):
    assert Lookup(2, 3).propose(text, count) == expected
    parts = Lookup(2, 3)
    for token in text[:-1]:
        parts.propose([token], 0)
    assert parts.propose(text[-1:], count) == expected


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], "", [3, 4]),
        ([1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 3, 7, 1, 2], "factor=9", [3, 7, 1, 2]),  # the newest 3
        ([9, 1, 2, 4, 8, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2], "factor=2", [4, 8, 1, 2]),  # 9 1 2 decides
        ([1, 2, 3, 5, 1, 2, 3, 6, 1, 2], "factor=9,min_probability=0.6", [3]),
        ([1, 2, 3, 4, 5, 1, 2], "factor=0.5", [3]),  # a half of two equal tokens
        ([1, 2, 3], "", []),
        ([4], "", []),
    ],
)
def test_the_most_frequent_continuation_is_proposed(text, options, expected):
    spec = parse_speculative(f"suffix:tokens=4{options and ','}{options}")
    proposals = Proposals(spec).begin(spec, "a")
    assert proposals.proposer.propose(text, 4) == expected


def test_earlier_outputs_are_proposed_to_their_tenant_only():
    spec = parse_speculative("suffix:tokens=4,outputs=4,factor=4")
    proposals = Proposals(spec)
    proposals.end("a", [5, 6, 7, 8])
    ask = lambda owner: proposals.begin(spec, owner).proposer.propose([1, 5, 6], 4)  # noqa: E731
    assert ask("a") == [7, 8]
    assert ask("b") == []
    for number in range(2 * 4):
        proposals.end("a", [10 + number] * 3)
    assert ask("a") == []  # the oldest are dropped
    none = Proposals(parse_speculative("suffix:outputs=0"))
    none.end("a", [5, 6, 7, 8])
    assert none.begin(spec, "a").proposer.propose([1, 5, 6], 4) == []


def test_finished_outputs_serve_later_requests(verifies_all):
    """A suffix of an earlier output is continued, and not for another tenant."""
    counts = []
    for tenant in ("default", "other"):
        engine = engine_of(rule=SUFFIX)
        prompt = [int(i * i % 60) for i in range(30)]
        for number, of in enumerate(("default", tenant)):
            engine.submit(
                GenerationRequest(
                    prompt,
                    SamplingParams(max_tokens=16, temperature=0.0),
                    request_id=str(number),
                    tenant=of,
                )
            )
            before = engine.stats().accepted_draft_tokens
            while engine.has_work:
                engine.step()
        counts.append(engine.stats().accepted_draft_tokens - before)
    assert counts[0] > counts[1]


def test_a_draft_model_fits_its_model():
    model, draft = loaded("llama"), loaded("qwen2")
    spec = replace(draft.spec, vocab_size=draft.spec.vocab_size + 1)
    with pytest.raises(ConfigError, match="vocabulary of llama"):
        with_draft(model, replace(draft, spec=spec))
    spec = replace(draft.spec, max_positions=model.spec.max_positions - 1)
    with pytest.raises(ConfigError, match="--max-model-len"):
        with_draft(model, replace(draft, spec=spec))
    whole = with_draft(model, draft)
    assert whole.spec.num_layers == model.spec.num_layers + draft.spec.num_layers


def test_lengths_follow_from_acceptance_and_measured_times():
    lengths, spec = DraftLengths(), parse_speculative("ngram")
    sure, doubtful = (Proposals(spec).begin(spec, "") for _ in range(2))
    for _ in range(20):
        for drafts, right in ((sure, 8), (doubtful, 0)):
            drafts.token_ids, drafts.num_accepted = [1] * 8, right
            drafts.settle()
    proposed = [(sure, 8), (doubtful, 8)]
    assert lengths.choose(2, proposed) == [8, 8]  # nothing is known of times
    for tokens in (2, 5, 2, 9, 18, 2, 10):
        lengths.learn(2, tokens, 0.05 + 0.005 * tokens)
    assert lengths.seconds() == pytest.approx((0.05, 0.005))
    assert lengths.choose(2, proposed) == [8, 0]
    assert lengths.choose(100, [(sure, 8)]) == [8]
    tried = [lengths.choose(2, [(doubtful, 8), (doubtful, 8)]) for _ in range(80)]
    due = [index for index, one in enumerate(tried, start=1) if one == [1, 1]]  # all in one step
    assert due == [34, 68]  # two tokens add a sixth to the time: 0.5 % of it in 34 steps
    assert tried.count([0, 0]) == 78
    lengths.learn(2, 10, 30.0)  # one slow step, as the first of a process
    tried = [lengths.choose(2, [(doubtful, 8), (doubtful, 8)]) for _ in range(128)]
    assert tried.count([1, 1]) == 2


def test_unequal_rows_that_cost_more_than_they_add_are_left_out():
    lengths, spec = DraftLengths(), parse_speculative("ngram")
    drafts = Proposals(spec).begin(spec, "")
    for tokens in (16, 17, 16, 18, 16, 17, 16, 18):
        lengths.learn(16, tokens, 0.1 + 0.02 * (tokens > 16))  # a fifth longer with proposals
    assert lengths.choose(16, [(drafts, 1)]) == [0]
    assert lengths.choose(16, [(drafts, 1)] * 8) == [1] * 8
