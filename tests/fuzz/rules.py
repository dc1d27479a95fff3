"""Draws eviction rules and codecs, with options small enough for short prompts."""

import random
from dataclasses import fields

from quire.errors import ConfigError
from quire.layout.eviction import SCHEDULES
from quire.policies.crushed import Crushed, CrushedShare
from quire.policies.eviction import make_eviction
from quire.policies.kvcrush import KVCrush
from quire.policies.registry import registered, registered_budgets

SMALL = {
    "window": 4,
    "lag": 4,
    "recent": 3,
    "last": 4,
    "beta": 4,
    "threshold": 0.3,
    "sinks": 2,
    "future": 16,
}
"""Options of rules and budgets, where these have them."""

GRANULARITIES = ("token", "token", "token", "chunk", "page")
PIECES_ONLY = ("kvcrush_openvino",)
TOKEN_CODECS = (
    "int8",
    "fp8",
    "int4",
    "int8/int4",
    "int4_outliers",
    "int4_hadamard",
    "int2",
    "int8+sinks=2+residual=8",
    "int4+residual=8",
)
PAGE_CODECS = (
    "int4_page",
    "int4_page/int4",
    "int2_page",
    "int4_page/int4+sinks=2+residual=12",
    "int2_page/int2",
)
LAYER_CODECS = ("int8+plain_layers=1", "int4+plain_layers=1")
PROMOTED = "int2+residual=16+promoted=4:int8"


def draw_codec(rng: random.Random, evict: str) -> str:
    """A codec; what it excludes is rarely drawn."""
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
    """An eviction rule with a cap that short prompts exceed; seldom an unsound one.

    Args:
        rng: source of random numbers.
        page_tokens: tokens of a page.
        budgets: draw budgets too.
    """
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
    granularity = "page" if name in PIECES_ONLY else rng.choice(GRANULARITIES)
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
