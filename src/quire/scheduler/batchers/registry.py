"""Batchers by name, and how a text such as `baton_pd:queue=8,hold=host` becomes one."""

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.policies.options import make_with_options
from quire.scheduler.batchers.base import BatcherRule
from quire.scheduler.batchers.baton_pd import BatonPD
from quire.scheduler.batchers.baton_pd_best_fit import BatonPDBestFit
from quire.scheduler.batchers.continuous import Continuous
from quire.scheduler.batchers.orca import Orca
from quire.scheduler.batchers.pd import PrefillDecode
from quire.scheduler.batchers.static import Static

BATCHERS: dict[str, type[BatcherRule]] = {
    rule.name: rule for rule in (Continuous, Static, PrefillDecode, Orca, BatonPD, BatonPDBestFit)
}
OF_DENSE_SLABS = "baton"


def parse_batcher(text: str) -> BatcherRule:
    """The rule of a text.

    Raises:
        UnknownName: no such batcher or option; offers the nearest.
        UnsoundCombination: one that needs a dense slab.
        ConfigError: an option without a value, given twice, or with a bad one.
    """
    name, colon, rest = (piece.strip() for piece in text.partition(":"))
    if name == OF_DENSE_SLABS:
        raise UnsoundCombination(
            "batcher 'baton' shapes the vectors of a dense slab, and an engine holds KV in pages, "
            "where a newcomer needs no place among others' columns: use baton_pd here, or "
            "quire.hf.DynamicBatch, which has a dense slab"
        )
    if name not in BATCHERS:
        raise UnknownName("batcher", name, BATCHERS)
    options = _options(name, rest) if colon else {}
    return make_with_options(f"batcher {name!r}", BATCHERS[name], options, others=(), nested={})


def _options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(
                f"batcher {name!r}: expected option=value such as queue=8, got {part!r}"
            )
        if key in options:
            raise ConfigError(f"batcher {name!r}: option {key!r} stands twice")
        options[key] = value
    return options
