"""Rules by name."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

import quire.hf.dynamic.rules as package
from quire.errors import ConfigError, UnknownName
from quire.hf.dynamic.rules.base import BatchRule

_RULES: dict[str, type[BatchRule]] = {}
_PAGED = "continuous"


def batch_rule(name: str) -> Callable[[type[BatchRule]], type[BatchRule]]:
    """Give a rule its name."""

    def register(rule: type[BatchRule]) -> type[BatchRule]:
        rule.name = name
        _RULES[name] = rule
        return rule

    return register


@cache
def rule_names() -> tuple[str, ...]:
    """All of them, sorted."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return tuple(sorted(_RULES))


def find_rule(name: str) -> BatchRule:
    """The rule of this name.

    Raises:
        UnknownName: there is none.
        ConfigError: it is one for pages only.
    """
    if name == _PAGED:
        raise ConfigError(
            "batcher='continuous' reads prompts in chunks beside decoding rows, which takes pages: "
            "use quire.LLM, or batcher='baton_pd' here"
        )
    if name not in rule_names():
        raise UnknownName("batcher", name, rule_names())
    return _RULES[name]()
