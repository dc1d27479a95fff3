"""The registry of features: how a user turns each on, and how a run shows that it has acted."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import eq, gt, lt

from composition.draft import ALL, AMPLE, SCARCE, Draft
from composition.in_transformers import run_cache, run_dynamic
from composition.ran import Ran
from quire.layout.eviction import parse_policy


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature; those with the same `alone_in` exclude each other: values of one option."""

    name: str  # in the table
    group: str  # heading in the table
    option: str  # how it is set
    draw: Callable[[Draft], None]  # adds the feature to a draft
    acted: Callable[[Ran], bool]  # whether a run that ended with the right answers shows its effect
    alone_in: str = ""  # "": it combines with all others of its group
    only_with: tuple[str, ...] | None = None  # groups that can be set together with it; None: all
    never_with: tuple[str, ...] = ()  # names that cannot be set together with it
    told: Callable[[Ran], str | None] | None = None  # the engine's reason for not using it
    run: Callable[[Draft], Ran] | None = None  # None: the engine, in little and in ample memory

    def excludes(self, other: "Feature") -> bool:
        """Whether both are values of one option, or cannot be set together."""
        same = bool(self.alone_in) and self.alone_in == other.alone_in
        return same or not (self._takes(other) and other._takes(self))

    def _takes(self, other: "Feature") -> bool:
        taken = self.only_with is None or other.group in self.only_with
        return taken and other.name not in self.never_with


def setting(**values: object) -> Callable[[Draft], None]:
    """A `draw` that sets fields of a draft; dictionaries are merged into its own."""

    def draw(draft: Draft) -> None:
        for name, value in values.items():
            setattr(draft, name, _joined(name, getattr(draft, name), value))

    return draw


def _joined(name: str, own: object, value: object) -> object:
    """The value of a field that two features set."""
    if isinstance(own, dict):
        longest = [v["max_tokens"] for v in (own, value) if "max_tokens" in v]
        return own | value | ({"max_tokens": max(longest)} if longest else {})
    if name == "units":
        return value if own == AMPLE else tuple(sorted({*own, *value}))
    if name in ("times", "host_units", "stream_units"):
        return max(own, value)
    return value


def both(*draws: Callable[[Draft], None]) -> Callable[[Draft], None]:
    """A `draw` that does what several do."""

    def draw(draft: Draft) -> None:
        for one in draws:
            one(draft)

    return draw


# ---- eviction: rules by family, schedules, granularities, budgets, rules of requests -------------

RULES = {
    "sinks": ("sinks:sinks=2", "first and newest tokens"),
    "streaming": ("streaming:sinks=2", "the same, positions re-rotated"),
    "random": ("random", "random tokens"),
    "h2o": ("h2o:recent=3", "sums of attention"),
    "average": ("average", "mean attention (Batch-Max)"),
    "tova": ("tova", "attention of the last query"),
    "snapkv": ("snapkv:window=4", "attention of a window of queries"),
    "expected_attention": ("expected_attention:future=16", "moments of queries"),
    "triattention": ("triattention:max_offset=64", "centres of queries"),
    "keydiff": ("keydiff", "keys"),
    "lagkv": ("lagkv:lag=4,sinks=2", "keys and values of later tokens"),
    "value_norm": ("value_norm:base=(h2o:recent=3)", "values, around another rule"),
    "criticalkv": ("criticalkv:base=(snapkv:window=4)", "values behind the output projection"),
    "threshold": ("threshold:base=(h2o:recent=3),tau=0.8", "a threshold, around another rule"),
    "rkv": ("rkv:window=4", "redundancy"),
    "kvcrush": ("kvcrush:base=(h2o:recent=3),share=0.5", "representatives, around another rule"),
    "kmeans": ("kmeans:share=0.5", "representatives by k-means"),
    "kvzip": ("kvzip:chunk=16", "a scoring pass after the prompt"),
}
WHEN = {"kvzip": "prefill_end"}  # the only schedule of a rule
OTHER_FORMS = {
    "random": ("random:scope=lane",),
    "tova": ("tova:scope=lane",),
    "value_norm": ("value_norm:base=tova",),
    "criticalkv": ("criticalkv:base=tova",),
    "threshold": ("threshold:base=tova,tau=0.8",),
    "kvcrush": (
        "kvcrush:base=tova,share=0.5",
        "kvcrush:base=keydiff,share=0.5",
        "kvcrush:base=(h2o:recent=3),share=0.5,sets=head",
    ),
    "kmeans": (
        "kmeans:base=tova,share=0.5",
        "kmeans:base=keydiff,share=0.5",
        "kmeans:base=(h2o:recent=3),share=0.5,sets=head",
    ),
    "lagkv": ("lagkv:lag=4,sinks=2,granularity=chunk,chunk_tokens=3",),  # ranks of tokens are equal
}
"""Tried where a feature excludes the first form: around another rule, or one set for each head."""

ALLOWED = (
    ("h2o:recent=3", "tova", "keydiff", "full"),
    ("tova", "sinks:sinks=2", "random", "full"),  # one set for all heads of a layer
    ("keydiff", "sinks:sinks=2", "lagkv:lag=4,sinks=2", "full"),  # without attention
    ("h2o:recent=3", "keydiff", "average", "full"),  # one set for each head
    ("streaming:sinks=2", "streaming:sinks=4", "streaming:sinks=3", "full"),
)


def _forms(name: str, text: str) -> dict[str, tuple[str, ...]]:
    others = OTHER_FORMS.get(name, ())
    return {"rule": (text, *others)} if others else {}


def _evicted(compare: Callable[[int, int], bool]) -> Callable[[Ran], bool]:
    """Whether tokens were evicted at a length that compares so with that of the prompt."""
    return lambda ran: any(
        compare(e.num_computed, length) for length, found in ran.traces for e in found
    )


def _unequal_lanes(ran: Ran) -> bool:
    return any(len(set(lengths)) > 1 for lengths in ran.lengths())


def _not_uniform(ran: Ran) -> bool:
    """Some lane retains more or less than the cap: a budget without a fixed total."""
    cap = parse_policy(str(ran.case.kv["evict"])).options["cap"]
    return any(length != int(cap) for lengths in ran.lengths() for length in lengths)


def _several_rules(ran: Ran) -> bool:
    named = [(f"r{n}", r.evict) for n, r in enumerate(ran.case.requests) if r.evict != "full"]
    return len({rule for n, rule in named if ran.scarce.answers[n].usage.evicted_tokens}) > 1


SCHEDULES = {
    "prefill_and_decode": (setting(when="prefill_and_decode", evicts=True), _evicted(lt)),
    "prefill_end": (setting(when="prefill_end", evicts=True), _evicted(eq)),
    "decode": (setting(when="decode", evicts=True), _evicted(gt)),
    "pressure": (
        setting(when="pressure", evicts=True, units=(0.6, 0.8, 1.0, 1.3, 1.6)),
        lambda ran: ran.happened("evicted pressure"),
    ),
}
BUDGETS = {
    "pyramid": "(pyramid:beta=4)",
    "by_layer": "(by_layer:factors={factors})",
    "scissors": "scissors",
    "squeeze": "squeeze",
    "lazy": "(lazy:last=4,threshold=0.5)",
    "fastgen": "(fastgen:share=0.85)",
    "ada": "ada",
    "duo": "(duo:scores=0.9/0.1/0.3/0.2)",
}
OTHER_BUDGETS = {
    "fastgen": ("(fastgen:share=0.6)", "(fastgen:share=0.97)", "(fastgen:share=0.4)"),
    "duo": ("(duo:scores=0.1/0.9)", "(duo:scores=0.9/0.1x3/0.3x4)", "(duo:scores=0.1/0.3x11)"),
    "lazy": tuple(f"(lazy:last=4,threshold={share})" for share in (0.6, 0.4, 0.2, 0.1)),
}
AFTER_PROMPT = ("squeeze", "lazy", "fastgen")  # their default schedule here

OF_RULES = (
    *(
        Feature(
            *(name, "eviction rule", f"`--evict {text}`: {basis}"),
            setting(rule=text, vary=_forms(name, text), rule_when=WHEN.get(name, "")),
            *(lambda ran: ran.evicted, "rule"),
        )
        for name, (text, basis) in RULES.items()
    ),
    *(
        Feature(name, "eviction schedule", f"`when={name}`", draw, acted, alone_in="when")
        for name, (draw, acted) in SCHEDULES.items()
    ),
    *(
        Feature(
            *(f"{name} granularity", "eviction granularity", f"`granularity={name}`"),
            *(setting(granularity=name, evicts=True), lambda ran: ran.evicted, "granularity"),
        )
        for name in ("chunk", "page")
    ),
    *(
        Feature(
            f"{name} budget",
            "eviction budget",
            f"`budget={text}`".replace("{factors}", "1.2/0.8"),
            setting(
                budget=text,
                vary={"budget": (text, *OTHER_BUDGETS.get(name, ()))},
                evicts=True,
                default_when="prefill_end" if name in AFTER_PROMPT else "prefill_and_decode",
            ),
            *(_not_uniform if name in AFTER_PROMPT else _unequal_lanes, "budget"),
        )
        for name, text in BUDGETS.items()
    ),
    Feature(
        *("rules of requests", "eviction rule", "`--evict-allow all`, and requests name rules"),
        *(setting(vary={"allowed": ALLOWED, "allows_all": (True, False)}), _several_rules),
    ),
)


# ---- how pages store numbers: codecs, full-precision tokens, mixed precision ---------------------

CODECS = (
    *("int8", "fp8", "int4", "int2", "int8/int4", "int4_outliers", "int4_hadamard", "int4_page"),
    *("int4_page/int4", "int8_channel/int8", "kvquant4", "int4:equalise=1"),
)
OF_VALUES = {
    "kvquant4": "int8/kvquant4",
    "int8_channel/int8": "int8/int8_channel",
    "int4:equalise=1": "int8/int4:equalise=1",
}
"""Tried where constants of keys cannot be used: the codec for values."""


SPARSE = "quest:pages=4,recent=2,dense_layers=0"


def _read_less(ran: Ran) -> bool:
    return ran.stats.sparse_pages_read < ran.stats.sparse_pages_held


def _codec_forms(name: str) -> dict[str, tuple[str, ...]]:
    return {"codec": (name, OF_VALUES[name])} if name in OF_VALUES else {}


def _coded(ran: Ran) -> bool:
    tables = ran.scarce.engine.pool.kv.memory.tables.values()
    return any(not table.group.page_class.is_plain for table in tables)


def _has_group(part: str):
    return lambda ran: any(part in name for name in ran.groups())


def _promoted(ran: Ran) -> bool:
    entries = [e for _, found in ran.traces for e in found]
    return any(len(lane) for e in entries for lane in e.promoted or ())


OF_STORING = (
    *(
        Feature(
            *(name, "codec", f"`--kv-codec {name}`"),
            *(setting(codec=name, vary=_codec_forms(name)), _coded, "codec"),
        )
        for name in CODECS
    ),
    Feature(
        *("sparse pages", "attention", f"`--sparse {SPARSE}`"),
        *(setting(kv={"sparse": SPARSE}), _read_less),
    ),
    Feature(
        *("full-precision tokens", "codec", "`--kv-codec int8+sinks=2+residual=8`"),
        *(setting(window="+sinks=2+residual=8"), _has_group("full_precision")),
    ),
    Feature(
        *("mixed precision", "codec", "`--kv-codec int2+residual=16+promoted=4:int8`"),
        *(setting(promoted="+residual=16+promoted=4:int8"), _promoted),
    ),
    Feature(
        *("plain layers", "codec", "`--kv-codec int8+plain_layers=1`"),
        *(setting(plain_layers="+plain_layers=1", times=2), _coded),
    ),
)


# ---- KV outside of the arena: preemption, prefix cache and tiers, offload ------------------------

OFTEN = (5, 9, 12, 15)
LATE = {"late_step": (9, 4, 6)}
HYBRID_UNITS = (0.2, 0.35, 0.5, 0.05, 0.75, 0.1)  # of swap space: less than some victim holds
OFFLOADS = setting(
    times=3,
    units=(*SCARCE, 0.96),
    stream_units=8.0,
    default_when="decode",
    vary={"grows": (False, True, ALL)},
)


def _offload(**options: object):
    off = {"offload_recompute": "off", "offload_cpu_attention": "off"}
    return both(OFFLOADS, lambda draft: draft.kv.update(off | dict(draft.kv) | options))


def _preempted(how: str):
    return lambda ran: ran.happened(f"preempted {how}")


def _offloaded(ran: Ran) -> bool:
    return ran.scarce.peaks["offloaded_bytes"] > 0


def _shared_prefix(ran: Ran) -> bool:
    return any(answer.usage.cached_tokens for answer in ran.scarce.answers.values())


def _tier(*names: str):
    return setting(tiers=names, kv={"enable_prefix_caching": True}, late=True, vary=LATE)


OF_MEMORY = (
    Feature(
        *("swap", "preemption", "`--preempt swap --swap-space SIZE`"),
        setting(schedule={"preempt": "swap"}, host_units=8.0, preempt_steps=OFTEN),
        *(_preempted("swap"), "preempt"),
    ),
    Feature(
        *("recompute", "preemption", "`--preempt recompute`"),
        setting(schedule={"preempt": "recompute"}, preempt_steps=OFTEN),
        *(_preempted("recompute"), "preempt"),
    ),
    Feature(
        *("hybrid", "preemption", "`--preempt hybrid`"),
        setting(
            schedule={"preempt": "hybrid"},
            preempt_steps=(1, 2, 3, *OFTEN),
            preempt_whole=True,
            # short prompts do not evict: a sequence is not divided after an eviction
            vary={"some_short": (False, True), "host_units": HYBRID_UNITS},
        ),
        *(_preempted("hybrid"), "preempt"),
    ),
    Feature(
        *("prefix cache", "prefix cache", "`--enable-prefix-caching` (default)"),
        *(setting(kv={"enable_prefix_caching": True}, late=True, vary=LATE), _shared_prefix),
    ),
    Feature(
        *("prefixes on disk", "prefix cache", "`--disk-kv-memory SIZE --disk-kv-path FOLDER`"),
        *(_tier("disk"), lambda ran: ran.happened("prefix_loaded"), "tier"),
    ),
    Feature(
        *("prefixes in Redis", "prefix cache", "`--remote-kv redis://HOST:PORT`"),
        *(_tier("remote"), lambda ran: ran.happened("prefix_loaded"), "tier"),
    ),
    Feature("KV offload", "offload", "`--kv-offload-memory SIZE`", _offload(), _offloaded),
    Feature(
        *("KV recompute", "offload", "`--kv-offload-recompute 0.5`"),
        *(_offload(offload_recompute="0.5"), lambda ran: ran.stats.recomputed_tokens > 0),
    ),
    Feature(
        *("CPU attention", "offload", "`--kv-offload-cpu-attention 0.5`"),
        *(_offload(offload_cpu_attention="0.5"), lambda ran: ran.stats.cpu_attended_tokens > 0),
    ),
    Feature(
        *("activations in codes", "offload", "`--kv-offload-activation-codec int8`"),
        _offload(offload_recompute="0.5", offload_activation_codec="int8"),
        lambda ran: ran.stats.recomputed_tokens > 0,
    ),
    Feature(
        *("weight offload", "offload", "`--weights-memory SIZE`"),
        setting(weights="stay=1", times=2),
        *(lambda ran: ran.stats.offloaded_weight_bytes > 0, "weights"),
    ),
    Feature(
        *("throughput objective", "offload", "`--weights-memory SIZE --objective throughput`"),
        setting(
            weights="stay=0",
            times=2,
            schedule={"objective": "throughput", "max_num_batched_tokens": 16, "chunk_tokens": 12},
        ),
        *(lambda ran: ran.stats.offloaded_weight_bytes > 0, "weights"),
    ),
    Feature(
        *("weights in int8", "offload", "`--weight-codec int8`"),
        setting(weights="int8"),
        *(lambda ran: ran.scarce.engine.model.weight_codec == "int8", "weights"),
    ),
)


# ---- scheduling: batchers, admission, chunked prefill, limits, tenants ---------------------------

BATCHERS = {
    "static": "static",
    "pd": "pd:ahead=1,window=8",
    "orca": "orca",
    "baton_pd": "baton_pd:queue=1",
    "baton_pd_best_fit": "baton_pd_best_fit:queue=1",
}
HELD = "baton_pd:queue=2,hold=host,lead=1"
CROSSED = (2.1, 2.6, 2.69, 3.0, 3.4, 3.8, 5.0, 5.7, 6.5)
"""Units of memory: a limit is crossed in one of them."""
LONG_OUTPUTS = {
    "max_tokens": 40,
    "min_tokens": 30,
}  # KV of running requests grows by a third or more
TENANTS = "a:weight=2; b; default"
SERVED = (("a", "b"), ("a", "b", "default"))  # tenants of the requests, in turn


SPECULATIVE = {
    "prompt lookup": ("ngram:tokens=3,min=1,max=2", False),
    "suffix proposals": ("suffix:tokens=3,depth=4,factor=3", False),
    "draft model": ("draft:model=gemma3,tokens=3", True),
}


def _beams_propose_nothing(ran: Ran) -> str | None:
    beams = all(request.params.get("use_beam_search") for request in ran.case.requests)
    return "beams are exchanged after each token, and have no proposed tokens" if beams else None


def _verified(ran: Ran) -> bool:
    return any(one.engine.stats().num_drafts for one in (ran.scarce, *ran.scarce.earlier))


def _batched(ran: Ran) -> bool:
    """The batcher had to choose: there were more requests than rows."""
    return ran.scarce.peaks["waiting"] > 0 and ran.scarce.kinds["admitted"] > 0


def _waited(ran: Ran) -> bool:
    return ran.scarce.peaks["waiting"] > 0


def _chunked(ran: Ran) -> bool:
    engines = (ran.scarce, *ran.scarce.earlier)
    chunks = sum(engine.kinds["chunk"] + engine.seen.chunks_in_layers for engine in engines)
    return chunks >= 3 * len(ran.case.requests)


def _both_tenants(ran: Ran) -> bool:
    return {"a", "b"} <= {one.tenant for one in ran.stats.served if one.output_tokens}


def _kept_below(ran: Ran, limit: str) -> bool:
    """Where memory is reserved at admission, the limit delays admissions instead.

    `scale_down_at` reserves 16 tokens of each request, all that a sliding window retains.
    """
    reserves = ran.case.schedule.get("admission") == "reserved"
    tables = ran.scarce.engine.pool.kv.memory.tables.values()
    reserves = reserves or all(table.group.window is not None for table in tables)
    most = float(str(ran.case.schedule[limit]))
    total_bytes = ran.scarce.engine.pool.kv.memory.total_bytes
    used_bytes = ran.scarce.peaks["used_bytes_of_several"]
    return reserves and _waited(ran) and 0 < used_bytes <= most * total_bytes


OF_SCHEDULING = (
    *(
        Feature(
            *(name, "batcher", f"`--batcher {text}`"),
            *(setting(schedule={"batcher": text, "max_num_seqs": 2}), _batched, "batcher"),
        )
        for name, text in BATCHERS.items()
    ),
    Feature(
        *("baton_pd on the host", "batcher", f"`--batcher {HELD}`"),
        setting(
            schedule={"batcher": HELD, "max_num_seqs": 2},
            host_units=8.0,
            params={"max_tokens": 16},
            vary={
                "schedule.batcher": (HELD, HELD.replace("queue=2", "queue=6")),
                "params.max_tokens": (16, 32),
            },
        ),
        *(lambda ran: ran.happened("swapped_out"), "batcher"),
    ),
    Feature(
        *("reserved admission", "scheduling", "`--admission reserved`"),
        setting(schedule={"admission": "reserved"}, units=(1.3, 1.8, 2.5, 3.5, 4.5)),
        *(_waited, "admission"),
    ),
    Feature(
        *("estimated admission", "scheduling", "`--admission estimated`"),
        setting(schedule={"admission": "estimated"}, units=(1.3, 1.8, 2.5)),
        *(_waited, "admission"),
    ),
    Feature(
        *("chunked prefill", "scheduling", "`--chunk-tokens 5`"),
        *(setting(schedule={"chunk_tokens": 5, "max_num_batched_tokens": 16}), _chunked),
    ),
    Feature(
        *("high watermark", "scheduling", "`--high-watermark 0.6`"),
        setting(
            watermark=0.6,
            units=CROSSED,
            params=LONG_OUTPUTS,
            some_short=True,
            vary={"watermark": (0.6, 0.52, 0.4), "short_tokens": (9, 3)},
        ),
        lambda ran: (
            ran.happened("preempted memory use above the high watermark")
            or _kept_below(ran, "high_watermark")
        ),
    ),
    Feature(
        *("scale_down_at", "scheduling", "`--scale-down-at 0.5 --swap-space SIZE`"),
        setting(
            schedule={"scale_down_at": 0.5},
            units=CROSSED,
            host_units=8.0,
            params=LONG_OUTPUTS,
            some_short=True,
            vary={"schedule.scale_down_at": (0.5, 0.35, 0.42, 0.25), "short_tokens": (9, 3)},
        ),
        lambda ran: (
            ran.happened("preempted memory use above scale_down_at")
            or _kept_below(ran, "scale_down_at")
        ),
    ),
    Feature(
        *("urgent requests", "scheduling", "`--urgent -1`"),
        setting(
            schedule={"urgent": -1},
            units=(*SCARCE, 2.6, 3.2),
            urgent=True,
            late=True,
            vary={"late_step": (9, 4, 6, 13)},
        ),
        lambda ran: ran.happened("preempted an urgent request is waiting"),
    ),
    Feature(
        *("tenants", "scheduling", f"`--tenants '{TENANTS}'`"),
        *(setting(schedule={"tenants": TENANTS}, vary={"tenants": SERVED}), _both_tenants),
    ),
    Feature(
        *("batch-invariant", "scheduling", "`--batch-invariant`"),
        setting(schedule={"batch_invariant": True}, exact=False),
        lambda ran: ran.outcome.worst == 0.0,
    ),
    Feature(
        *("cancellation", "scheduling", "a request is cancelled while it runs"),
        setting(cancels=True),
        lambda ran: any(choice.finish_reason == "abort" for choice in ran.choices),
    ),
    *(
        Feature(
            *(f"{name} attention", "attention", f"`--attention {name}`"),
            *(setting(kv={"attention": name}), lambda ran: True, "attention"),
        )
        for name in ("gathered", "reference")
    ),
    *(
        Feature(
            *(name, "scheduling", f"`--speculative {text}`"),
            setting(
                schedule={"speculative": text},
                params={"max_tokens": 40},
                vary={"params.max_tokens": (40, 120)},
                **({"units": (4.0, 6.0)} if model else {}),
            ),
            *(_verified, "speculative"),
            told=_beams_propose_nothing,
        )
        for name, (text, model) in SPECULATIVE.items()
    ),
)


# ---- outputs of a request: several of a prompt, sampling options, structure ----------------------

FORCED = 53  # the token "5", which the pattern and the allowed tokens have too
LETTERS = [*b"abcd-0123456789efg"]
STOPS = "efghijklm789"
PATTERN = "[a-d]{2}-[0-9]{3,36}"
BEGUN = "[a-d]{0,2}|[a-d]{2}-[0-9]{0,36}"


def _several(ran: Ran) -> bool:
    return all(len(choices) > 1 for choices in ran.outputs) and ran.happened("shared", "copied")


def _ranked(ran: Ran) -> bool:
    return all(choice.score is not None for choices in ran.outputs for choice in choices)


def _not_the_likeliest(ran: Ran) -> bool:
    """Some token is not the one with the highest logit."""
    found = {(context[0], int(row.argmax())) for context, row in ran.scarce.seen.logits.items()}
    known = {tokens for tokens, _ in found}
    for number, request in enumerate(ran.case.requests):
        for choice in ran.scarce.answers[f"r{number}"].choices:
            for i, token in enumerate(choice.token_ids):
                before = (*request.prompt, *choice.token_ids[:i])
                if before in known and (before, token) not in found:
                    return True
    return False


def _distinct(ran: Ran) -> bool:
    return all(len(set(c.token_ids)) == len(c.token_ids) for c in ran.choices) and (
        _not_the_likeliest(ran)
    )


def _only(allowed: list[int]):
    return lambda ran: all(token in allowed for c in ran.choices for token in c.token_ids)


def _structured(ran: Ran) -> bool:
    full = [c for c in ran.choices if c.finish_reason != "abort"]
    early = {c.text for c in full if c.stop_reason is not None}  # at a stop token or text
    whole = re.compile(PATTERN)
    return any(c.text for c in full) and all(
        whole.fullmatch(c.text) or (c.text in early and re.fullmatch(BEGUN, c.text)) for c in full
    )


def _scored(ran: Ran) -> bool:
    return any(answer.prompt_logprobs for answer in ran.scarce.answers.values())


def _sampling(name: str, option: str, acted, **params: object) -> Feature:
    return Feature(name, "sampling", option, setting(params=params), acted)


OF_SAMPLING = (
    Feature(
        "n=2", "several outputs", "`n=2`", setting(params={"n": 2}), _several, alone_in="outputs"
    ),
    Feature(
        *("best_of", "several outputs", "`n=2, best_of=3, temperature=1`"),
        setting(params={"n": 2, "best_of": 3, "temperature": 1.0}),
        *(lambda ran: _several(ran) and _ranked(ran), "outputs"),
    ),
    Feature(
        *("beam search", "several outputs", "`use_beam_search, beam_width=3, n=2`"),
        setting(params={"use_beam_search": True, "beam_width": 3, "n": 2, "temperature": None}),
        *(lambda ran: _several(ran) and _ranked(ran), "outputs"),
    ),
    _sampling(
        "temperature",
        "`temperature=1, top_p=0.9, seed`",
        _not_the_likeliest,
        temperature=1.0,
        top_p=0.9,
    ),
    _sampling(
        "penalties",
        "`presence_penalty=2, frequency_penalty=2, repetition_penalty=2`",
        _distinct,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
    ),
    _sampling(
        "logit_bias",
        "`logit_bias`",
        lambda ran: any(FORCED in c.token_ids for c in ran.choices),
        logit_bias={FORCED: 3.0},
    ),
    _sampling(
        "allowed_token_ids", "`allowed_token_ids`", _only(LETTERS), allowed_token_ids=LETTERS
    ),
    _sampling(
        "stop_token_ids",
        "`stop_token_ids`",
        lambda ran: any(c.finish_reason == "stop" for c in ran.choices),
        stop_token_ids=list(range(2, 128, 6)),
        max_tokens=16,
    ),
    Feature(
        *("stop texts", "sampling", "`stop`"),
        setting(params={"stop": [*STOPS], "max_tokens": 16}, tokenizer=True),
        lambda ran: any(isinstance(c.stop_reason, str) for c in ran.choices),
    ),
    Feature(
        *("structured output", "sampling", f"`structured_outputs={{'regex': '{PATTERN}'}}`"),
        *(setting(params={"structured_outputs": {"regex": PATTERN}}, tokenizer=True), _structured),
    ),
    _sampling(
        "logprobs",
        "`logprobs=2`",
        lambda ran: all(c.logprobs for c in ran.choices if c.finish_reason != "abort"),
        logprobs=2,
    ),
    Feature(
        *("prompt_logprobs", "sampling", "`prompt_logprobs=1`"),
        *(setting(first_params={"prompt_logprobs": 1}), _scored),
    ),
)


# ---- kinds of models -----------------------------------------------------------------------------

MODELS = {
    "sliding windows": ("gemma3", "half of the layers (`gemma3`)"),
    "windows in all layers": ("mistral", "`mistral` with sliding windows"),
    "attention sinks": ("gpt_oss", "`gpt_oss`, with windows and experts"),
    "learned positions": ("opt", "`opt`"),
    "long RoPE": ("phi3_longrope", "`phi3` with long RoPE"),
    "one KV head": ("llama_mqa", "`llama` with one KV head"),
    "native decoder": ("wide_llama", "`llama` in C (`--model-impl native`)"),
    "unequal heads": ("gemma4_unified", "other dims and KV heads in windows (`gemma4_unified`)"),
    "shared KV": ("gemma4", "layers that read the KV of other layers (`gemma4`)"),
    "chunked attention": ("llama4", "half of the layers (`llama4`)"),
    "latent attention": ("deepseek_v3", "one latent per token (`deepseek_v3`)"),
    "recurrent states": ("qwen3_5", "half of the layers (`qwen3_5`)"),
    "sparse attention": ("glm_moe_dsa", "an index selects latents (`glm_moe_dsa`)"),
}

OTHERS = {
    "long RoPE": "phi3_longrope_window",
    "one KV head": "wide_mistral",
    "native decoder": "wide_qwen2",
    "unequal heads": "gemma4_apart",
    "latent attention": "youtu",
    "sparse attention": "glm_moe_dsa_dense",
}
"""Tried where a feature needs sliding windows, several KV heads, or no experts."""


def _models(name: str, architecture: str) -> dict[str, tuple[str, ...]]:
    return {"architecture": (architecture, OTHERS[name])} if name in OTHERS else {}


OF_MODELS = tuple(
    Feature(
        *(name, "model", option),
        setting(
            architecture=architecture,
            times=2 if architecture == "gpt_oss" else 1,
            vary=_models(name, architecture),
        ),
        *(lambda ran: ran.outcome.compared > 0 or ran.case.approximate, "model"),
    )
    for name, (architecture, option) in MODELS.items()
)


# ---- Quire inside Transformers: a cache for generate, and dynamic batches ------------------------

OF_TEXTS = ("structured output", "stop texts")
OF_EVICTION = ("eviction schedule", "eviction granularity", "eviction budget")

OF_TRANSFORMERS = (
    Feature(
        "QuireCache",
        "Transformers",
        "`model.generate(..., cache=quire.hf.QuireCache(model, ...))`",
        *(setting(), lambda ran: True, "Transformers"),
        only_with=("eviction rule", *OF_EVICTION, "codec", "model"),
        never_with=("rules of requests", "pressure"),
        run=run_cache,
    ),
    Feature(
        *("DynamicBatch", "Transformers", "`quire.hf.DynamicBatch(model, ...)`"),
        *(setting(), lambda ran: True, "Transformers"),
        only_with=("batcher", "model", "sampling"),
        never_with=("baton_pd on the host", *OF_TEXTS, "logprobs", "prompt_logprobs"),
        run=run_dynamic,
    ),
)


FEATURES: tuple[Feature, ...] = (
    *OF_RULES,
    *OF_STORING,
    *OF_MEMORY,
    *OF_SCHEDULING,
    *OF_SAMPLING,
    *OF_MODELS,
    *OF_TRANSFORMERS,
)
