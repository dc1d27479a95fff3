"""Draws the case of a seed: rules and codecs, options, requests, and what later features add."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from fuzz.case import Case, RequestCase
from quire.errors import ConfigError
from quire.layout.eviction import SCHEDULES, parse_policy
from quire.policies.crushed import Crushed, CrushedShare
from quire.policies.eviction import make_eviction
from quire.policies.kvcrush import KVCrush
from quire.policies.registry import registered, registered_budgets

# ---- rules and codecs, with options small enough for short prompts -------------------------------

SMALL = {"window": 4, "lag": 4, "recent": 3, "last": 4, "beta": 4, "threshold": 0.3} | {
    "sinks": 2,
    "future": 16,
}

GRANULARITIES = ("token", "token", "token", "chunk", "page")
TOKEN_CODECS = (
    *("int8", "fp8", "int4", "int8/int4", "int4_outliers", "int4_hadamard", "int2"),
    *("int8+sinks=2+residual=8", "int4+residual=8"),
)
PAGE_CODECS = (
    *("int4_page", "int4_page/int4", "int2_page", "int4_page/int4+sinks=2+residual=12"),
    "int2_page/int2",
)
LAYER_CODECS = ("int8+plain_layers=1", "int4+plain_layers=1")
PROMOTED = "int2+residual=16+promoted=4:int8"


def draw_codec(rng: random.Random, evict: str) -> str:
    if rng.random() < 0.55:
        return "none"
    evicts, pages = evict != "full", "granularity=page" in evict
    choices = list(TOKEN_CODECS)
    if not evicts or pages or rng.random() < 0.05:
        choices += PAGE_CODECS
    if not evicts or rng.random() < 0.05:
        choices += LAYER_CODECS
    if evict.startswith(("h2o", "average", "keydiff", "tova")):
        choices += [PROMOTED] * 4
    return rng.choice(choices)


def draw_rule(rng: random.Random, *, page_tokens: int, budgets: bool = True) -> str:
    """An eviction rule with a cap that short prompts exceed; seldom an unsound one."""
    for _ in range(12):
        text = _draw_rule(rng, page_tokens, budgets=budgets)
        if _is_sound(text) or rng.random() < 0.02:
            return text
    return text


def _is_sound(text: str) -> bool:
    try:
        make_eviction(text)
    except ConfigError:
        return False
    return True


def _draw_rule(rng: random.Random, page_tokens: int, *, budgets: bool) -> str:
    name = rng.choice(sorted(registered()))
    when = rng.choice((*SCHEDULES, "pressure"))
    granularity = "page" if name in ("kvcrush_openvino",) else rng.choice(GRANULARITIES)
    every = rng.randint(2, 8)
    cap = every + rng.randint(8, 24)
    if granularity == "page":
        cap += 4 * page_tokens
    options = [*_own_options(rng, name), f"cap={cap}", f"every={every}", f"when={when}"]
    if granularity != "token":
        options += [f"granularity={granularity}", "chunk_tokens=2"]
    if rng.random() < 0.15 and granularity == "token" and budgets:
        options.append(f"budget={_draw_budget(rng, cap)}")
    return f"{name}:{','.join(options)}"


def _own_options(rng: random.Random, name: str) -> list[str]:
    made = registered()[name]
    options = [f"{f.name}={SMALL[f.name]}" for f in fields(made) if f.name in SMALL]
    if "base" in {f.name for f in fields(made)} and rng.random() < 0.5:
        options.append(f"base=({rng.choice(['h2o:recent=3', 'average', 'h2o:recent=2,sinks=1'])})")
    if issubclass(made, CrushedShare):
        options.append("share=0.5")
    if issubclass(made, Crushed) and rng.random() < 0.4:
        options.append("sets=head")
    if made is KVCrush:
        options += rng.choice(([], ["pick=best"]))
    return options


def _draw_budget(rng: random.Random, cap: int) -> str:
    name, made = rng.choice(sorted(registered_budgets().items()))
    options = [f"{f.name}={SMALL[f.name]}" for f in fields(made) if f.name in SMALL]
    if "streaming" in {f.name for f in fields(made)}:
        options.append(
            "scores=" + rng.choice(("0.9/0.1/0.3/0.2", "0.1/0.2/0.3/0.9", "0.1/0.9", "0.2x7/0.5"))
        )
    if "caps" in {f.name for f in fields(made)}:
        options.append("caps=" + "/".join([str(cap + 3), str(cap - 3)]))
    return f"({name}:{','.join(options)})" if options else name


# ---- what later features add; other parts of the case stay as they are ---------------------------

CALIBRATED = ("int8_channel", "int4:equalise=1/int8", "kvquant4/int4", "none/int8_channel")
PATTERNS = ("[a-d]{2}-[0-9]{3,12}", "(yes|no|perhaps)", '\\{"a": [0-9]{1,9}\\}')
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
    model = case.model if "*" in case.model else f"{case.model}*{3}"
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
    codec = _codec(case)
    refused = not SYNCHRONOUS.isdisjoint(case.schedule)
    refused |= any(part in codec for part in ("+", "kivi", "_page"))
    refused |= bool(case.stream_room or case.tiers or case.weights)
    if rng.random() >= 0.5 or refused:
        return case
    return replace(case, schedule={**case.schedule, "async_scheduling": True})


def _sparse(rng: random.Random, case: Case) -> Case:
    """Sparse attention, if the case's other options support it."""
    codec, evict = _codec(case), str(case.kv["evict"])
    refused = any(part in codec for part in ("kvquant", "_channel", "equal"))
    refused |= case.kv.get("offload_cpu_attention", "off") != "off"
    rules = [evict, str(case.kv.get("evict_allow", "")), *(r.evict or "" for r in case.requests)]
    refused |= any("streaming" in rule or rule == "all" for rule in rules)
    refused |= case.model.partition("*")[0] in (*ALL_WINDOWED, *LATENTS)
    if rng.random() >= 0.3 or refused:
        return case
    share, layers = rng.choice((20, 40, 70)), rng.choice((0, 1))
    layers *= case.model != "mimo_v2_flash"  # only its first layer has full attention
    rule = f"quest:budget={share}%,recent={rng.choice((1, 2))},dense_layers={layers}"
    return replace(case, kv={**case.kv, "sparse": rule})


def _speculative(rng: random.Random, case: Case) -> Case:
    """Speculative decoding, if the case's other options support it."""
    refused = bool(case.stream_room or "sparse" in case.kv)
    refused |= bool(case.schedule.get("async_scheduling"))
    if rng.random() >= 0.5 or refused:
        return case
    tokens = rng.choice((1, 3, 6))
    rules = [f"ngram:tokens={tokens},min=1,max=2", f"suffix:tokens={tokens},depth=4,factor=3"]
    if case.model != "quire-tiny" and not case.tiers:  # a vocabulary and files of its own
        rules.append(f"draft:model={rng.choice(('llama', 'gemma3'))},tokens={tokens}")
    rule = rng.choice(rules)
    return replace(case, schedule={**case.schedule, "speculative": rule})


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
    "sparse": _sparse,
    "speculative": _speculative,
}


# ---- the case ------------------------------------------------------------------------------------

ROTARY = ("llama", "llama_mha", "llama_mqa", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2")
MODELS = (*ROTARY, *ROTARY, "opt", "gpt2", "gpt_neox", "mistral", "qwen2_window", "stablelm")
KINDS = ("gemma3n", "gemma4", "gemma4_unified", "llama4")
LATENTS = ("deepseek_v3", "minicpm3")
"""In place of one rotary model in seven: lanes that are unequal, shared, chunked or latent."""
WINDOWED = ("gemma2", "gemma3", "mistral", "qwen2_window", "gpt_oss", *KINDS)
ALL_WINDOWED = ("mistral",)
VOCAB_SIZE, TINY_VOCAB_SIZE = 128, 2048
LONGEST_PROMPT, MAX_NEW_TOKENS = 56, 14
ALONE, GROUP, BEAMS = ("alone", "alone", "alone"), "group", "beams"
ONE_SET = ("full", "recent", "sinks", "random", "tova", "kmeans", "kvcrush")
"""Rules that keep the same tokens for all heads of a layer."""
TENANTS = ("a", "b")


def draw(seed: int) -> Case:
    """The case of a seed: the same one every time."""
    rng = random.Random(f"quire {seed}")
    streams = rng.random() < 0.25
    page_tokens = rng.choice((2, 4, 4, 4, 8, 16))
    evict = "full" if rng.random() < 0.4 else draw_rule(rng, page_tokens=page_tokens)
    codec = draw_codec(rng, evict) if not evict.startswith("streaming") else "none"
    exact = codec != "none" or (evict != "full" and rng.random() < 0.7)
    model = _of_kind(seed, _draw_model(rng, exact=exact, streams=streams, evicts=evict != "full"))
    kv = _draw_kv(rng, page_tokens, evict=evict, codec=codec, model=model, streams=streams)
    if exact:
        kv["attention"] = "auto" if evict.startswith("streaming") else "gathered"
    host_room = rng.choice((0, 0.5, 2, 4))
    schedule = _draw_schedule(rng, swaps=bool(host_room))
    pressed = "when=pressure" in evict
    case = Case(
        seed=seed,
        model=model,
        exact=exact,
        poison=rng.random() < 0.5,
        room=round(rng.uniform(0.2, 0.9) if streams or pressed else rng.uniform(0.4, 1.5), 2),
        host_room=host_room,
        stream_room=rng.choice((0.5, 2, 8)) if streams else 0,
        kv=kv,
        schedule=schedule,
        requests=_draw_requests(rng, evict=evict, kv=kv, model=model),
    )
    return extend(case)


def _of_kind(seed: int, model: str) -> str:
    """This model or one of another kind; the draws that follow are the same for both."""
    rng, (name, times, count) = random.Random(f"kind {seed}"), model.partition("*")
    other = rng.choice((*KINDS, *LATENTS)) + times + count
    return other if name in ROTARY and rng.random() < 1 / 7 else model


def _draw_model(rng: random.Random, *, exact: bool, streams: bool, evicts: bool) -> str:
    if rng.random() < 0.03:
        return "quire-tiny"
    choices = [name for name in MODELS if not (evicts and name in ALL_WINDOWED)]
    if not exact:
        choices += INEXACT
    if streams:
        choices = [name for name in choices if name not in ALL_WINDOWED]
    return f"{rng.choice(choices)}*3" if streams else rng.choice(choices)


def _draw_kv(
    rng: random.Random, page_tokens: int, *, evict: str, codec: str, model: str, streams: bool
) -> dict[str, object]:
    kv: dict[str, object] = {"page_tokens": page_tokens, "evict": evict, "codec": codec}
    kv["enable_prefix_caching"] = rng.random() < 0.6
    kv["scratch"] = rng.choice(("64MiB", "64MiB", "16KiB"))
    if rng.random() < 0.15 and evict == "full":
        kv["attention"] = rng.choice(("gathered", "reference"))
    if streams:
        plain = not any(part in codec for part in ("page", "+"))
        recomputes = plain and (evict.partition(":")[0] in ONE_SET or model.startswith("llama_mqa"))
        kv |= _draw_stream(rng, recomputes=recomputes or rng.random() < 0.02)
    return kv


def _draw_stream(rng: random.Random, *, recomputes: bool) -> dict[str, object]:
    parts = ("off", "0.5", "1") if recomputes else ("off",)
    options: dict[str, object] = {"offload_recompute": rng.choice(parts), "scratch": "64MiB"}
    if recomputes and rng.random() < 0.2 and options["offload_recompute"] != "1":
        most = "1" if options["offload_recompute"] == "off" else "0.5"  # together 1 at most
        options["offload_cpu_attention"] = rng.choice(("0.5", most))
    else:
        options["offload_cpu_attention"] = "off"
    if options["offload_recompute"] != "off" and rng.random() < 0.1:
        options["offload_activation_codec"] = "int8"
    return options


def _draw_schedule(rng: random.Random, *, swaps: bool) -> dict[str, object]:
    schedule: dict[str, object] = {
        "max_num_seqs": rng.choice((4, 5, 8, 16)),
        "max_num_batched_tokens": rng.choice((24, 40, 64, 256)),
        "chunk_tokens": rng.choice((5, 8, 16, 64)),
        "admission": rng.choice(("optimistic", "optimistic", "reserved", "estimated")),
        "preempt": rng.choice(("auto", "swap", "hybrid") if swaps else ("auto", "recompute")),
    }
    if rng.random() < 0.4:
        schedule["batcher"] = _draw_batcher(rng, swaps=swaps)
    if rng.random() < 0.2:
        low = round(rng.uniform(0.6, 0.95), 2)
        schedule |= {"low_watermark": low, "high_watermark": round(rng.uniform(low, 1.0), 2)}
    if rng.random() < 0.1:
        schedule["scale_down_at"] = round(rng.uniform(0.6, 1.0), 2)
    if rng.random() < 0.15:
        schedule["urgent"] = rng.choice((-1, 0))
    if rng.random() < 0.15:
        schedule["tenants"] = "a:weight=2; b"
    return schedule


def _draw_batcher(rng: random.Random, *, swaps: bool) -> str:
    name = rng.choice(("static", "pd", "orca", "baton_pd", "baton_pd_best_fit"))
    if name == "pd":
        return f"pd:ahead={rng.choice((0, 1, 2))},window={rng.choice((4, 64))}"
    if name.startswith("baton"):
        prefill, hold = rng.choice(("async", "sync")), "device"
        if swaps:
            hold = rng.choice(("device", "host"))
        return f"{name}:queue={rng.choice((0, 2, 8))},prefill={prefill},hold={hold}"
    return name


# ---- requests ----------------------------------------------------------------------------------


def _draw_requests(
    rng: random.Random, *, evict: str, kv: Mapping[str, object], model: str
) -> tuple[RequestCase, ...]:
    vocab = VOCAB_SIZE if model != "quire-tiny" else TINY_VOCAB_SIZE
    beginnings = [[], *([rng.randrange(2, vocab) for _ in range(n)] for n in (9, 17, 32))]
    rules = [None] if evict == "full" else [None, None, _other_numbers(rng, evict)]
    alone = "offload_recompute" in kv and rng.random() < 0.6  # only these have offloaded pages
    kinds = ALONE if alone else (*ALONE, GROUP, GROUP, BEAMS)
    made = []
    for number in range(rng.randint(2, 6)):
        prompt = list(rng.choice(beginnings))
        rest = rng.randint(1, LONGEST_PROMPT - len(prompt))
        prompt += [rng.randrange(2, vocab) for _ in range(rest)]
        made.append(_draw_request(rng, prompt, number, rules, kinds))
    return tuple(made)


def _other_numbers(rng: random.Random, evict: str) -> str:
    if evict == "full" or rng.random() < 0.3:
        return "full"
    cap = parse_policy(evict).options["cap"]
    return evict.replace(f"cap={cap}", f"cap={int(cap) + rng.randint(1, 9)}")


def _draw_request(
    rng: random.Random,
    prompt: list[int],
    number: int,
    rules: list[str | None],
    kinds: Sequence[str],
) -> RequestCase:
    cancelled = rng.random() < 0.12
    params = _draw_params(rng, number, rng.choice(kinds))
    return RequestCase(
        prompt=tuple(prompt),
        params=params,
        step=rng.choice((0, 0, rng.randint(0, 9))),
        priority=rng.randint(-1, 1),
        tenant=rng.choice(TENANTS),
        evict=rng.choice(rules),
        cancel_step=rng.randint(1, 30) if cancelled else None,
        cancel_index=rng.choice((None, 0, 1)) if cancelled else None,
    )


def _draw_params(rng: random.Random, number: int, kind: str) -> dict[str, object]:
    params: dict[str, object] = {
        "max_tokens": rng.randint(1, MAX_NEW_TOKENS),
        "ignore_eos": True,
        "logprobs": rng.choice((0, 1, 2)),
    }
    if kind == BEAMS:
        params |= {"use_beam_search": True, "beam_width": rng.choice((2, 3, 4))}
        params["n"] = rng.randint(1, int(params["beam_width"]))
        params["early_stopping"] = rng.choice((True, False, "never"))
        if rng.random() < 0.5:
            params["stop_token_ids"] = [rng.randrange(2, VOCAB_SIZE) for _ in range(6)]
        return params
    params |= {"temperature": rng.choice((0.0, 0.0, 0.8, 1.0)), "seed": number}
    if kind == GROUP:
        params["n"] = rng.choice((2, 2, 3, 4))
        if rng.random() < 0.3 and params["temperature"]:
            params["best_of"] = int(params["n"]) + 1
    if rng.random() < 0.2:
        params["stop_token_ids"] = [rng.randrange(2, VOCAB_SIZE) for _ in range(8)]
    if rng.random() < 0.1:
        params["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.1:
        params |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
    return params
