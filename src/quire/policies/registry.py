"""Names of policies and budgets, and how a text becomes one.

A policy is found by standing in `quire.policies`, a budget in `quire.policies.budgets`; packages of
others name their modules under the entry-point groups `quire.policies` and `quire.budgets`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import TypeVar

from quire import policies
from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import parse_policy
from quire.policies import budgets
from quire.policies.base import EvictionPolicy
from quire.policies.budgets.base import Budget, Uniform
from quire.policies.options import Nested, check_options, make_with_options

FULL = "full"
SCHEDULE_OPTIONS = ("cap", "every", "when", "budget", "granularity", "chunk_tokens")
P = TypeVar("P", bound=EvictionPolicy)
B = TypeVar("B", bound=Budget)
_POLICIES: dict[str, type[EvictionPolicy]] = {}
_BUDGETS: dict[str, type[Budget]] = {"uniform": Uniform}
_loaded: set[str] = set()


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Give a policy class its name.

    Raises:
        ConfigError: the name is taken, or the class is no dataclass whose fields have defaults.
    """

    def put(policy: type[P]) -> type[P]:
        if name in (FULL, *_POLICIES) and _POLICIES.get(name) is not policy:
            raise ConfigError(f"two policies are called {name!r}")
        check_options(f"policy {name!r}", policy, taken=SCHEDULE_OPTIONS, nested=_nested())
        _POLICIES[name] = policy
        return policy

    return put


def register_budget(name: str) -> Callable[[type[B]], type[B]]:
    """Give a budget class its name.

    Raises:
        ConfigError: the name is taken, or the class is no dataclass whose fields have defaults.
    """

    def put(budget: type[B]) -> type[B]:
        if _BUDGETS.get(name, budget) is not budget:
            raise ConfigError(f"two budgets are called {name!r}")
        check_options(f"budget {name!r}", budget, taken=(), nested={})
        _BUDGETS[name] = budget
        return budget

    return put


def registered() -> Mapping[str, type[EvictionPolicy]]:
    """All policies by name; `full` (keep everything) is not a rule and not among them."""
    _load(policies, "quire.policies")
    return dict(sorted(_POLICIES.items()))


def registered_budgets() -> Mapping[str, type[Budget]]:
    """All budgets by name."""
    _load(budgets, "quire.budgets")
    return dict(sorted(_BUDGETS.items()))


def make_policy(text: str) -> EvictionPolicy:
    """Build a rule from a text without schedule options, as one nested in another is written.

    Raises:
        UnknownName: the policy or one of its options is not known; offers the nearest names.
        ConfigError: a value of the wrong type, or one that the rule refuses.
    """
    parsed = parse_policy(text)
    if parsed.name == FULL:
        raise ConfigError(
            f"{text!r} keeps everything: no rule stands around it; name one that evicts, as h2o"
        )
    misplaced = [option for option in parsed.options if option in SCHEDULE_OPTIONS]
    if misplaced:
        raise ConfigError(
            f"{', '.join(misplaced)} of {text!r} cannot stand inside another rule, whose schedule "
            "holds; write it behind the parentheses"
        )
    return policy_of(parsed.name, parsed.options)


def policy_of(name: str, options: Mapping[str, str]) -> EvictionPolicy:
    """Build a rule from its name and its own options; see `make_policy`."""
    known = registered()
    if name not in known:
        raise UnknownName("eviction policy", name, (FULL, *known))
    return make_with_options(
        f"policy {name!r}", known[name], options, others=SCHEDULE_OPTIONS, nested=_nested()
    )


def make_budget(text: str) -> Budget:
    """Build a budget from a text such as `pyramid:beta=20`.

    Raises:
        UnknownName: the budget or one of its options is not known; offers the nearest names.
        ConfigError: a value of the wrong type, or one that the budget refuses.
    """
    parsed, known = parse_policy(text, "budget"), registered_budgets()
    if parsed.name not in known:
        raise UnknownName("eviction budget", parsed.name, known)
    what = f"budget {parsed.name!r}"
    return make_with_options(what, known[parsed.name], parsed.options, others=(), nested={})


def _nested() -> Nested:
    return {EvictionPolicy: make_policy}


def _load(package: ModuleType, group: str) -> None:
    """Import every module of a package and every entry point of its group, once."""
    if group in _loaded:
        return
    _loaded.add(group)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            raise ConfigError(
                f"the eviction rules of {entry.value!r} (entry point {entry.name!r}, group "
                f"{group}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
