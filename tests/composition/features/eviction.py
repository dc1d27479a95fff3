"""Eviction: rules by family, schedules, granularities, budgets, rules of requests."""

from composition.feature import Feature, setting
from composition.ran import Ran
from quire.layout.eviction import parse_policy

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


def _before_end_of_prompt(ran: Ran) -> bool:
    return any(e.num_computed < length for length, found in ran.traces for e in found)


def _at_end_of_prompt(ran: Ran) -> bool:
    return any(e.num_computed == length for length, found in ran.traces for e in found)


def _after_prompt(ran: Ran) -> bool:
    return any(e.num_computed > length for length, found in ran.traces for e in found)


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
    "prefill_and_decode": (setting(when="prefill_and_decode", evicts=True), _before_end_of_prompt),
    "prefill_end": (setting(when="prefill_end", evicts=True), _at_end_of_prompt),
    "decode": (setting(when="decode", evicts=True), _after_prompt),
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

FEATURES = (
    *(
        Feature(
            name=name,
            group="eviction rule",
            option=f"`--evict {text}`: {basis}",
            draw=setting(rule=text, vary=_forms(name, text), rule_when=WHEN.get(name, "")),
            acted=lambda ran: ran.evicted,
            alone_in="rule",
        )
        for name, (text, basis) in RULES.items()
    ),
    *(
        Feature(
            name=name,
            group="eviction schedule",
            option=f"`when={name}`",
            draw=draw,
            acted=acted,
            alone_in="when",
        )
        for name, (draw, acted) in SCHEDULES.items()
    ),
    *(
        Feature(
            name=f"{name} granularity",
            group="eviction granularity",
            option=f"`granularity={name}`",
            draw=setting(granularity=name, evicts=True),
            acted=lambda ran: ran.evicted,
            alone_in="granularity",
        )
        for name in ("chunk", "page")
    ),
    *(
        Feature(
            name=f"{name} budget",
            group="eviction budget",
            option=f"`budget={text}`".replace("{factors}", "1.2/0.8"),
            draw=setting(
                budget=text,
                vary={"budget": (text, *OTHER_BUDGETS.get(name, ()))},
                evicts=True,
                default_when="prefill_end" if name in AFTER_PROMPT else "prefill_and_decode",
            ),
            acted=_not_uniform if name in AFTER_PROMPT else _unequal_lanes,
            alone_in="budget",
        )
        for name, text in BUDGETS.items()
    ),
    Feature(
        name="rules of requests",
        group="eviction rule",
        option="`--evict-allow all`, and requests name rules",
        draw=setting(vary={"allowed": ALLOWED, "allows_all": (True, False)}),
        acted=_several_rules,
    ),
)
