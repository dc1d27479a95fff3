"""Batchers by name, and the parser of texts such as `baton_pd:queue=8,hold=host`."""

from collections.abc import Mapping
from typing import TypeVar

from quire.errors import ConfigError, UnknownName
from quire.layout import limits
from quire.policies.options import make_with_options
from quire.scheduler.batchers.base import BatcherRule, DenseRule, PagedRule
from quire.scheduler.batchers.continuous import Continuous, Orca
from quire.scheduler.batchers.phases import PrefillDecode, Static
from quire.scheduler.batchers.prefilled import Baton, BatonPD, BatonPDBestFit

R = TypeVar("R", bound=BatcherRule)
_BOTH = (Static, PrefillDecode, Orca, BatonPD, BatonPDBestFit)

BATCHERS: dict[str, type[PagedRule]] = {rule.name: rule for rule in (Continuous, *_BOTH)}
DENSE_BATCHERS: dict[str, type[DenseRule]] = {rule.name: rule for rule in (Baton, *_BOTH)}


def parse_batcher(text: str) -> PagedRule:
    """Parse a batching rule for paged KV.

    Raises:
        UnknownName: an unknown batcher or option; suggests the closest names.
        UnsoundCombination: a batcher that needs a dense slab.
        ConfigError: an option without a value, repeated, or with an invalid value.
    """
    name, options = _split(text)
    if name == Baton.name:
        raise limits.refused(limits.DENSE_BATCHER)
    return _make(BATCHERS, name, options)


def parse_dense_batcher(text: str) -> DenseRule:
    """Parse a batching rule for dense rows.

    Raises:
        UnknownName: an unknown batcher or option; suggests the closest names.
        ConfigError: the rule or an option is only for paged KV; or see `parse_batcher`.
    """
    name, options = _split(text)
    if name == Continuous.name:
        raise ConfigError(
            "batcher='continuous' needs paged KV for chunked prefill: use "
            "batcher='baton_pd' here, or quire.LLM, which takes the same model object"
        )
    rule = _make(DENSE_BATCHERS, name, options)
    for option in options:
        if option not in rule.dense_options:
            raise ConfigError(
                f"batcher {name!r}: option {option!r} is only for paged KV, and this batch has "
                "dense rows: leave it out, or use the batch's options prefill, prefill_tokens and "
                "queue"
            )
    return rule


def _make(rules: Mapping[str, type[R]], name: str, options: Mapping[str, str]) -> R:
    if name not in rules:
        raise UnknownName("batcher", name, rules)
    return make_with_options(f"batcher {name!r}", rules[name], options, others=(), nested={})


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, colon, rest = (piece.strip() for piece in text.partition(":"))
    return name, _options(name, rest) if colon else {}


def _options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(
                f"batcher {name!r}: expected option=value such as queue=8, got {part!r}"
            )
        if key in options:
            raise ConfigError(f"batcher {name!r}: option {key!r} is repeated: keep one")
        options[key] = value
    return options
