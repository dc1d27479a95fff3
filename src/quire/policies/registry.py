"""Registry of policies and budgets by name, and construction of them from text.

Policies are the modules of `quire.policies`, budgets those of `quire.policies.budgets`. Other
packages list their modules under the entry-point groups `quire.policies` and `quire.budgets`. The
option --policy-file names a file that registers more.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from threading import RLock
from types import ModuleType
from typing import TypeVar

from quire import policies
from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import AUTO, SCHEDULE_OPTIONS, parse_policy
from quire.layout.extras import require_extra
from quire.policies import budgets
from quire.policies.base import EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.budgets.uniform import Uniform
from quire.policies.options import Nested, check_options, make_with_options

FULL = "full"
_BY_FILE = "of your own: --policy-file FILE, in Python policy_file=FILE"
RULE_BY_FILE, _BUDGET_BY_FILE = f"a rule {_BY_FILE}", f"a budget {_BY_FILE}"
P = TypeVar("P", bound=EvictionPolicy)
B = TypeVar("B", bound=Budget)
_POLICIES: dict[str, type[EvictionPolicy]] = {}
_BUDGETS: dict[str, type[Budget]] = {"uniform": Uniform}
_loaded: set[str] = set()
_loading = RLock()  # a module that is imported may read the registry


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Register a policy class under a name.

    Raises:
        ConfigError: the name is taken, or the class is not a dataclass whose fields have defaults.
    """

    def put(policy: type[P]) -> type[P]:
        if name in (FULL, AUTO, *_POLICIES) and _POLICIES.get(name) is not policy:
            raise ConfigError(f"two policies are called {name!r}; rename one")
        check_options(f"policy {name!r}", policy, taken=SCHEDULE_OPTIONS, nested=_nested())
        _POLICIES[name] = policy
        return policy

    return put


def register_budget(name: str) -> Callable[[type[B]], type[B]]:
    """Register a budget class under a name.

    Raises:
        ConfigError: the name is taken, or the class is not a dataclass whose fields have defaults.
    """

    def put(budget: type[B]) -> type[B]:
        if _BUDGETS.get(name, budget) is not budget:
            raise ConfigError(f"two budgets are called {name!r}; rename one")
        check_options(f"budget {name!r}", budget, taken=(), nested={})
        _BUDGETS[name] = budget
        return budget

    return put


def registered() -> Mapping[str, type[EvictionPolicy]]:
    """Return all policies by name, without `full` (retain everything), which is not a rule."""
    _load(policies, "quire.policies")
    return dict(sorted(_POLICIES.items()))


def registered_budgets() -> Mapping[str, type[Budget]]:
    """Return all budgets by name."""
    _load(budgets, "quire.budgets")
    return dict(sorted(_BUDGETS.items()))


def load_policy_file(file: str) -> None:
    """Import a file that registers policies or budgets, unless this process has imported it.

    Args:
        file: the path; "" for none.

    Raises:
        ConfigError: there is no such file, its import fails, it registers nothing, or a name is
            taken.
    """
    others = [module for name, module in [*sys.modules.items()] if name != file]
    if not file or file in _loaded | {getattr(module, "__file__", None) for module in others}:
        return
    known = {**registered(), **registered_budgets()}
    spec = importlib.util.spec_from_file_location(file, file)  # the path is the module's name
    if spec is None or spec.loader is None or not os.path.isfile(file):
        raise ConfigError(f"expected --policy-file as a Python file, got {file}: no such .py file")
    sys.modules[file] = module = importlib.util.module_from_spec(spec)
    saved = dict(_POLICIES), dict(_BUDGETS)
    try:
        spec.loader.exec_module(module)
        if known.keys() == _POLICIES.keys() | _BUDGETS.keys():
            raise ConfigError('it registers no policy: put @register("NAME") above a class')
    except Exception as error:
        del sys.modules[file]
        _restore(*saved)
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"cannot load --policy-file {file}: {kind}{error}") from error
    _loaded.add(file)


@contextmanager
def temporary_registrations() -> Iterator[None]:
    """Discard what the block registers; entry points are reloaded in the block and after it."""
    registered()
    registered_budgets()
    saved_policies, saved_budgets = dict(_POLICIES), dict(_BUDGETS)
    _loaded.clear()
    try:
        yield
    finally:
        _restore(saved_policies, saved_budgets)
        _loaded.clear()


def _restore(
    saved_policies: Mapping[str, type[EvictionPolicy]], saved_budgets: Mapping[str, type[Budget]]
) -> None:
    _POLICIES.clear()
    _POLICIES.update(saved_policies)
    _BUDGETS.clear()
    _BUDGETS.update(saved_budgets)


def make_policy(text: str) -> EvictionPolicy:
    """Build a rule from text without schedule options, such as a rule nested in another.

    Raises:
        UnknownName: the policy or one of its options is not known; lists the nearest names.
        ConfigError: a value has the wrong type, the rule refuses it, or it needs packages that are
            not installed.
    """
    parsed = parse_policy(text)
    if parsed.name == FULL:
        raise ConfigError(
            f"{text!r} retains all tokens and cannot be nested in another rule; use a rule that "
            "evicts, such as h2o"
        )
    misplaced = [option for option in parsed.options if option in SCHEDULE_OPTIONS]
    if misplaced:
        raise ConfigError(
            f"{', '.join(misplaced)} of {text!r} cannot be set inside another rule, whose schedule "
            "applies; write it after the parentheses"
        )
    return policy_of(parsed.name, parsed.options)


def policy_of(name: str, options: Mapping[str, str]) -> EvictionPolicy:
    """Build a rule from its name and its own options; see `make_policy`."""
    known = registered()
    if name not in known:
        raise UnknownName("eviction policy", name, (FULL, *known), more=RULE_BY_FILE)
    if known[name].extra:
        require_extra(known[name].extra, f"the eviction rule {name}")
    return make_with_options(
        f"policy {name!r}", known[name], options, others=SCHEDULE_OPTIONS, nested=_nested()
    )


def make_budget(text: str) -> Budget:
    """Build a budget from text such as `pyramid:beta=20`.

    Raises:
        UnknownName: the budget or one of its options is not known; lists the nearest names.
        ConfigError: a value has the wrong type, or the budget refuses it.
    """
    parsed, known = parse_policy(text, "budget"), registered_budgets()
    if parsed.name not in known:
        raise UnknownName("eviction budget", parsed.name, known, more=_BUDGET_BY_FILE)
    what = f"budget {parsed.name!r}"
    return make_with_options(what, known[parsed.name], parsed.options, others=(), nested={})


def _nested() -> Nested:
    return {EvictionPolicy: make_policy}


def _load(package: ModuleType, group: str) -> None:
    """Import every module of a package and every entry point of its group, once."""
    with _loading:  # another thread may see the names only when all are registered
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
                    f"cannot load the eviction rules of {entry.value!r} (entry point "
                    f"{entry.name!r}, group {group}): {type(error).__name__}: {error}"
                ) from error
