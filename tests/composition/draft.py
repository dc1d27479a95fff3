"""What features ask of a run, and the fuzz case that has all of it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from fuzz.build import ROOM_FOR_ALL
from fuzz.case import Case, RequestCase
from support import zoo

PAGE_TOKENS, CAP, EVERY, NEW_TOKENS, GROWN_TOKENS = 4, 20, 4, 8, 40
SHARED_TOKENS = 16  # of all prompts
LARGER = 4 * PAGE_TOKENS  # of caps and prompts, where pages are evicted or KV has to grow
LONG = 120  # of prompts, where the smallest memory is large
OTHER_TOKENS = (20, 27, 33, 14)
ALL = "all"
AMPLE = (ROOM_FOR_ALL,)  # memory for all requests, in units of the largest one
SCARCE = (0.6, 0.85, 1.1, 1.5, 2.1)
"""Sizes that are tried one after the other, until every feature has acted."""

ONE_IN_TWO = ("gpt_oss",)  # zoo models of two layers, one of them with a sliding window
DEFAULT_RULES = ("h2o:recent=3", "tova", "keydiff", "snapkv:window=4", "sinks:sinks=2")
"""Where a feature needs a rule and none is named: the first one with which the features act."""


@dataclass
class Draft:
    """A run that features fill in, each its own part.

    Attributes:
        when, granularity, budget: parts of the eviction's text.
        vary: values of fields that are tried one after the other, until every feature has acted.
        codec, window, promoted, plain_layers: parts of the codec's text.
        kv, schedule: options of `KVConfig` and `ScheduleConfig`.
        params, first_params: arguments of `SamplingParams` of every request, and of the first half.
        allowed: rules that single requests name, and whether they may name all others.
        architecture, times, weights, tiers, preempt_steps, preempt_whole, tokenizer: as in `Case`.
        host_units, stream_units: sizes of the swap space and of offload memory.
        late: the last requests are submitted while the first ones run, before step `late_step`.
        grows: like `some_short`, with more tokens to generate; `ALL`: all requests are short.
        exact: products in float64; None where codes (also of activations) or evictions need them.
    """

    rule: str | None = None  # name and own options of the eviction rule; None: no token is evicted
    evicts: bool = False  # a schedule, a granularity or a budget needs a rule
    when: str = ""
    rule_when: str = ""  # the only schedule of the rule; "": it has several
    default_when: str = "prefill_and_decode"  # schedule if none is set
    vary: dict[str, tuple[object, ...]] = field(default_factory=dict)
    granularity: str = "token"
    budget: str = ""
    codec: str = ""
    window: str = ""
    promoted: str = ""
    plain_layers: str = ""
    kv: dict[str, object] = field(default_factory=dict)
    schedule: dict[str, object] = field(default_factory=dict)
    params: dict[str, object] = field(default_factory=dict)
    first_params: dict[str, object] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    allows_all: bool = True
    tenants: tuple[str, ...] = ("default",)  # of the requests, in turn
    architecture: str = "llama"
    times: int = 1
    weights: str = ""
    tiers: tuple[str, ...] = ()
    preempt_steps: tuple[int, ...] = ()
    preempt_whole: bool = False
    tokenizer: bool = False
    units: tuple[float, ...] = AMPLE  # sizes of the KV memory to try
    host_units: float = 0.0
    stream_units: float = 0.0
    late: bool = False
    late_step: int = 9
    urgent: bool = False  # the last request has priority over the others
    watermark: float | None = None  # low and high watermark of the memory
    some_short: bool = False  # the last requests are short, so that their KV grows below a cap
    grows: bool | str = False
    short_tokens: int = 9  # of the last requests, if they are short
    cancels: bool = False  # the second request is cancelled
    exact: bool | None = None

    # ---- variants ------------------------------------------------------------------------------

    def variants(self) -> Iterator["Draft"]:
        """This draft with each combination of the values in `vary`; the first has the defaults."""
        named = self.rule is not None or {"rule", "allowed"} & set(self.vary)
        vary = {"rule": DEFAULT_RULES} if self._needs_rule and not named else {}
        vary |= self.vary
        for values in product(*vary.values()):
            yield self._with(dict(zip(vary, values, strict=True)))

    def _with(self, values: dict[str, object]) -> "Draft":
        """This draft with other values; "schedule.batcher" is a key of a field."""
        fields: dict[str, object] = {}
        for name, value in values.items():
            field_name, _, key = name.partition(".")
            fields[field_name] = getattr(self, field_name) | {key: value} if key else value
        return replace(self, vary={}, **fields)

    def differing(self, other: "Draft") -> str:
        """Values that another variant does not have, as text."""
        found = []
        for name, value in vars(self).items():
            known = getattr(other, name)
            if isinstance(value, dict):
                found += [f"{key} {new}" for key, new in value.items() if known.get(key) != new]
            elif value != known:
                found.append(f"{name} {value}")
        return "; ".join(found)

    @property
    def _watermarks(self) -> dict[str, object]:
        both = ("low_watermark", "high_watermark")
        return {} if self.watermark is None else dict.fromkeys(both, self.watermark)

    @property
    def _rows(self) -> dict[str, object]:
        """Rows for two requests with all their outputs, if the batcher has few."""
        outputs = self.params.get("beam_width") or self.params.get("best_of")
        return {"max_num_seqs": 6} if outputs and "batcher" in self.schedule else {}

    @property
    def _of_one_output(self) -> dict[str, object]:
        """Parameters without those of several outputs."""
        dropped = {"n", "best_of"}
        if "use_beam_search" in self.params:
            dropped |= {"use_beam_search", "beam_width", "temperature"}
        return {name: value for name, value in self.params.items() if name not in dropped}

    @property
    def _ends(self) -> dict[str, object]:
        """Beams in a structure end with the end-of-sequence token."""
        both = {"use_beam_search", "structured_outputs"} <= self.params.keys()
        return {"ignore_eos": False} if both else {}

    # ---- texts ---------------------------------------------------------------------------------

    @property
    def cap(self) -> int:
        """Cap of the requests, in tokens; a prompt ends inside a page, which a fork copies."""
        return (
            CAP + LARGER * self._has_larger_cap + 2 * ("prefill_end" in (self.when, self.rule_when))
        )

    @property
    def _has_larger_cap(self) -> bool:
        return self.granularity == "page" or self.has_short

    @property
    def has_short(self) -> bool:
        """Whether the last requests are short."""
        return self.some_short or bool(self.grows)

    def eviction(self, rule: str | None = None) -> str:
        """The eviction as text: with the draft's rule, or another."""
        rule = rule or self.rule or next(iter(self.allowed), None)
        if rule in (None, "full"):
            return "full"
        when = self.when or self.rule_when or self.default_when
        options = [f"cap={self.cap}", f"every={EVERY}", f"when={when}"]
        if self.granularity != "token":
            options += [f"granularity={self.granularity}", "chunk_tokens=2"]
        if self.budget:
            layers = self.times * (1 if self.architecture in ONE_IN_TWO else 2)
            factors = "/".join(["1.2", "0.8"] * (layers // 2))
            options.append(f"budget={self.budget}".replace("{factors}", factors))
        return rule + ("," if ":" in rule else ":") + ",".join(options)

    @property
    def _needs_rule(self) -> bool:
        return self.evicts or bool(self.promoted)

    @property
    def coded(self) -> bool:
        """Whether KV is stored in codes."""
        return bool(self.codec or self.window or self.promoted or self.plain_layers)

    def stored(self) -> str:
        """The codec as text."""
        if not self.coded:
            return "none"
        base = self.codec or ("int2" if self.promoted else "int8")
        return base + (self.promoted or self.window) + self.plain_layers

    @property
    def _rounds(self) -> bool:
        """Whether the last bits of a number can change others: codes, or the choice of tokens."""
        return self.coded or self.eviction() != "full" or self.weights == "int8"

    # ---- the case ------------------------------------------------------------------------------

    def case(self, units: float, seed: int = 0) -> Case:
        """The fuzz case, in KV memory of this size."""
        exact = self._rounds if self.exact is None else self.exact
        kv: dict[str, object] = {
            "page_tokens": PAGE_TOKENS,
            "evict": self.eviction(),
            "codec": self.stored(),
            "enable_prefix_caching": False,
        }
        if exact and not self.eviction().startswith("streaming"):
            kv["attention"] = "gathered"
        if self.allowed:
            named = [rule for rule in self.allowed if rule != "full"]
            kv["evict_allow"] = "all" if self.allows_all else "; ".join(named)
        schedule = {"max_num_batched_tokens": 64, "chunk_tokens": 16, "max_num_seqs": 8}
        if len(self.units) > 1:
            schedule["admission"] = "optimistic"
        return Case(
            seed=seed,
            model=self.architecture + f"*{self.times}" * (self.times > 1),
            exact=exact,
            poison=not self.weights and not self.tiers,
            room=units,
            host_room=self.host_units,
            stream_room=self.stream_units,
            weights=self.weights,
            tiers=self.tiers,
            preempt_steps=self.preempt_steps,
            preempt_whole=self.preempt_whole,
            tokenizer=self.tokenizer,
            kv=kv | self.kv,
            schedule=schedule | self.schedule | self._watermarks | self._rows,
            requests=self._requests(seed),
        )

    def _requests(self, seed: int) -> tuple[RequestCase, ...]:
        rng = random.Random(f"composition {seed}")
        shared = _tokens(rng, SHARED_TOKENS)
        made = []
        for number, tokens in enumerate(OTHER_TOKENS):
            count = tokens + LARGER * self._has_larger_cap + LONG * bool(self.allowed)
            rule = self.allowed[number % len(self.allowed)] if self.allowed else None
            late = number >= len(OTHER_TOKENS) // 2
            # sequences of a group do not evict under pressure: the last requests have one output
            alone = late and self.when == "pressure"
            made.append(
                RequestCase(
                    prompt=_tokens(rng, self.short_tokens)
                    if (late and self.has_short) or self.grows == ALL
                    else (*shared, *_tokens(rng, count)),
                    params={"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": number}
                    | {"temperature": 0.0, "logprobs": 0}
                    | (self._of_one_output if alone else self.params)
                    | ({"max_tokens": GROWN_TOKENS} if self.grows else {})
                    | (self.first_params if not late else {})
                    | self._ends,
                    step=self.late_step * late * self.late,
                    priority=-1 if self.urgent and number == len(OTHER_TOKENS) - 1 else 0,
                    tenant=self.tenants[number % len(self.tenants)],
                    evict=None if rule is None else self.eviction(rule),
                    cancel_step=7 if self.cancels and number == 1 else None,
                )
            )
        return tuple(made)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(count))
