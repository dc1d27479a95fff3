"""Draws what later features add to the case of a seed; other parts of the case stay as they are."""

import random
from dataclasses import replace

from fuzz.case import Case, RequestCase
from fuzz.rules import LAYER_CODECS, PAGE_CODECS, PROMOTED, TOKEN_CODECS, draw_rule

CALIBRATED = ("int8_channel", "int4:equalise=1/int8", "kvquant4/int4", "none/int8_channel")
PATTERNS = ("[a-d]{2}-[0-9]{3,12}", "(yes|no|perhaps)", '\\{"a": [0-9]{1,9}\\}')
LAYERS_TIMES = 3
SYNCHRONOUS = frozenset(
    {"batcher", "batch_invariant", "high_watermark", "scale_down_at", "tenants", "urgent"}
)
"""Options that asynchronous scheduling does not support."""

INEXACT = ("mixtral", "gpt_oss", "phi3_longrope", "granite")
"""Models whose experts multiply outside of linear layers, or that scale what they multiply."""
STREAMED = ("llama", "llama_mha", "llama_mqa", "qwen2", "qwen3", "gemma3", "opt", "gpt2")


def extend(case: Case) -> Case:
    """The case with weight offload, tiers, forced preemptions, structures, rules and so on.

    Each is drawn apart, so that one more feature changes no other part of a seed's case.
    """
    for name, change in CHANGES.items():
        case = change(random.Random(f"quire {name} {case.seed}"), case)
    return case


def _weights(rng: random.Random, case: Case) -> Case:
    if rng.random() >= 0.12 or case.model.partition("*")[0] not in STREAMED:
        return case
    model = case.model if "*" in case.model else f"{case.model}*{LAYERS_TIMES}"
    schedule = case.schedule
    if rng.random() < 0.4:
        schedule = {**schedule, "objective": "throughput"}
    return replace(case, model=model, weights=f"stay={rng.randint(0, 2)}", schedule=schedule)


def _tiers(rng: random.Random, case: Case) -> Case:
    shares = case.kv["enable_prefix_caching"] and not str(case.kv["evict"]).startswith("streaming")
    if rng.random() >= 0.15 or not shares or case.model == "quire-tiny":
        return case
    return replace(case, tiers=(rng.choice(("disk", "remote")),))


def _preempts(rng: random.Random, case: Case) -> Case:
    if rng.random() >= 0.2:
        return case
    steps = {rng.randint(2, 40) for _ in range(rng.randint(1, 5))}
    return replace(case, preempt_steps=tuple(sorted(steps)))


def _structures(rng: random.Random, case: Case) -> Case:
    if rng.random() >= 0.12 or case.model == "quire-tiny":
        return case
    requests = tuple(_structured(rng, request) for request in case.requests)
    return replace(case, tokenizer=True, requests=requests)


def _structured(rng: random.Random, request: RequestCase) -> RequestCase:
    params = dict(request.params)
    if rng.random() < 0.6:
        params["structured_outputs"] = {"regex": rng.choice(PATTERNS)}
        params["stop_token_ids"] = ()
    elif rng.random() < 0.5:
        params["stop"] = [*rng.sample("abcdefghijklmnopqrstuvwxyz ", 4)]
    return replace(request, params=params)


def _rules(rng: random.Random, case: Case) -> Case:
    plain = "plain_layers" not in _codec(case)
    rerotates = str(case.kv["evict"]).startswith("streaming")
    if rng.random() >= 0.15 or not plain or rerotates or "promoted" in _codec(case):
        return case
    rules = [None, "full", *(_rule(rng, case) for _ in range(3))]
    requests = tuple(replace(request, evict=rng.choice(rules)) for request in case.requests)
    kv = {**case.kv, "evict_allow": "all"}
    kv |= {} if "attention" in kv else {"attention": "gathered"}
    return replace(case, kv=kv, requests=requests, exact=True)


def _rule(rng: random.Random, case: Case) -> str:
    """A rule that re-rotates no positions."""
    text = "streaming"
    while text.startswith("streaming"):
        text = draw_rule(rng, page_tokens=int(str(case.kv["page_tokens"])), budgets=False)
    return text


def _codecs(rng: random.Random, case: Case) -> Case:
    """Codecs of pages and layers with evictions; any codec with re-rotated positions."""
    evict = str(case.kv["evict"])
    if rng.random() >= 0.3 or evict == "full" or PROMOTED in _codec(case) or case.model in INEXACT:
        return case
    choices = PAGE_CODECS + LAYER_CODECS
    choices += TOKEN_CODECS if evict.startswith("streaming") else ()
    attention = "auto" if evict.startswith("streaming") else "gathered"
    kv = {**case.kv, "codec": rng.choice(choices), "attention": attention}
    return replace(case, kv=kv, exact=True)


def _calibrated(rng: random.Random, case: Case) -> Case:
    if rng.random() >= 0.3 or _codec(case) != "int8" or "*" in case.model:
        return case
    return replace(case, kv={**case.kv, "codec": rng.choice(CALIBRATED)})


def _invariant(rng: random.Random, case: Case) -> Case:
    if rng.random() >= 0.08 or case.exact or case.weights or "attention" in case.kv:
        return case
    return replace(case, schedule={**case.schedule, "batch_invariant": True})


def _asynchronous(rng: random.Random, case: Case) -> Case:
    """Asynchronous scheduling, if the case's other options support it."""
    codec = _codec(case)
    refused = not SYNCHRONOUS.isdisjoint(case.schedule)
    refused |= any(part in codec for part in ("+", "kivi", "_page"))
    refused |= bool(case.stream_room or case.tiers or case.weights)
    if rng.random() >= 0.5 or refused:
        return case
    return replace(case, schedule={**case.schedule, "async_scheduling": True})


def _codec(case: Case) -> str:
    return str(case.kv.get("codec", "none"))


CHANGES = {
    "codecs": _codecs,
    "weights": _weights,
    "tiers": _tiers,
    "preempts": _preempts,
    "structures": _structures,
    "rules": _rules,
    "calibrated": _calibrated,
    "invariant": _invariant,
    "asynchronous": _asynchronous,
}
