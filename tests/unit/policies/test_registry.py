from dataclasses import make_dataclass
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from quire.errors import ConfigError, UnknownName
from quire.policies import registry
from quire.policies.base import EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.budgets.uniform import Uniform
from quire.policies.h2o import H2O
from quire.policies.recent import Recent
from quire.policies.value_norm import ValueNorm


@pytest.fixture(autouse=True)
def temporary_registrations():
    """Discard what a test registers, and read entry points again."""
    with registry.temporary_registrations():
        yield


def publish(monkeypatch, group, code, name="installed_rules"):
    """Simulate an installed distribution whose entry point names a module with this code."""
    module = ModuleType(name)

    def load(entry):
        monkeypatch.setitem(registry.importlib.sys.modules, name, module)
        exec(code, module.__dict__)
        return module

    entry = EntryPoint(name=name, value=f"{name}.module", group=group)
    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(
        registry, "entry_points", lambda *, group: [entry] if group == entry.group else []
    )


INSTALLED_RULE = """
from dataclasses import dataclass
from quire.policies.recent import Recent
from quire.policies.registry import register

@register("installed")
@dataclass(frozen=True, slots=True)
class Installed(Recent):
    more: int = 3
"""
INSTALLED_BUDGET = """
from dataclasses import dataclass
from quire.policies.budgets.base import Budget
from quire.policies.registry import register_budget

@register_budget("installed_budget")
@dataclass(frozen=True, slots=True)
class Installed(Budget):
    more: int = 3
"""
NAMED_RULE = """
from dataclasses import dataclass
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register

@register("named")
@dataclass(frozen=True, slots=True)
class Named(SinksAndRecent):
    def {method}(self, view):
        return -view.positions.float()
"""


def test_rules_of_installed_packages_are_registered(monkeypatch):
    publish(monkeypatch, "quire.policies", INSTALLED_RULE)

    assert "installed" in registry.registered()
    assert registry.make_policy("installed:more=5,sinks=2").more == 5
    assert "installed_budget" not in registry.registered_budgets()
    with registry.temporary_registrations():
        publish(monkeypatch, "quire.budgets", INSTALLED_BUDGET)
        assert registry.make_budget("installed_budget:more=5").more == 5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        (INSTALLED_RULE.replace("installed", "recent"), "two policies are called 'recent'"),
    ],
)
def test_package_that_cannot_be_loaded_is_named(monkeypatch, code, message):
    publish(monkeypatch, "quire.policies", code)

    with pytest.raises(ConfigError) as refused:
        registry.registered()

    assert "the eviction rules of 'installed_rules.module'" in str(refused.value)
    assert "group quire.policies" in str(refused.value)
    assert message in str(refused.value)


def test_policy_file_is_loaded_once(tmp_path):
    file = tmp_path / "my_rule.py"
    file.write_text(INSTALLED_RULE + INSTALLED_BUDGET)

    registry.load_policy_file("")
    registry.load_policy_file(str(file))
    registry.load_policy_file(str(file))

    assert registry.make_policy("installed:more=5,sinks=2").more == 5
    assert registry.make_budget("installed_budget:more=5").more == 5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "expected --policy-file as a Python file, got .*: no such .py file"),
        ("x = 1", r'registers no policy: put @register\("NAME"\) above a class'),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        (INSTALLED_RULE + "1 / 0", "ZeroDivisionError: division by zero"),
        (INSTALLED_RULE.replace("installed", "recent"), "two policies are called 'recent'"),
        ("def (", "SyntaxError: "),
        (NAMED_RULE.format(method="scores"), r"score: it has scores, did you mean score\?$"),
        (NAMED_RULE.format(method="rank"), r"\(class Named\) has no method score: define score$"),
    ],
)
def test_policy_file_that_cannot_be_loaded_is_named(tmp_path, code, message):
    file = tmp_path / "my_rule.py"
    if code is not None:
        file.write_text(code)

    with pytest.raises(ConfigError, match=message) as refused:
        registry.load_policy_file(str(file))

    assert str(file) in str(refused.value)
    assert "installed" not in registry.registered()


def test_names_are_sorted_suggested_and_nested_with_and_without_parentheses():
    assert list(registry.registered()) == sorted(registry.registered())
    assert list(registry.registered_budgets()) == sorted(registry.registered_budgets())
    assert "full" not in registry.registered()
    assert registry.registered_budgets()["uniform"] is Uniform
    for make, text, message in UNKNOWN:
        with pytest.raises(UnknownName, match=message):
            make(text)

    plain = registry.make_policy("value_norm:base=h2o")
    options = registry.make_policy("value_norm:base=(h2o:recent=3,heads=max),power=2")
    nested = registry.make_policy("value_norm:base=(value_norm:base=(recent:sinks=2))")
    assert plain == ValueNorm(base=H2O())
    assert options == ValueNorm(base=H2O(recent=3, heads="max"), power=2.0)
    assert nested == ValueNorm(base=ValueNorm(base=Recent(sinks=2)))


UNKNOWN = [
    (registry.make_policy, "h20", "unknown eviction policy 'h20': did you mean h2o"),
    (registry.make_policy, "h20", r"\? \(a rule of your own: --policy-file FILE, in Python pol"),
    (registry.make_policy, "by_length", r"(tova|h2o).*, value_norm.*\(a rule of your own: --pol"),
    (registry.make_budget, "pyramide", r"did you mean pyramid\? \(a budget of your own: --pol"),
    (registry.make_budget, "pyramide", "unknown eviction budget 'pyramide': did you mean"),
    (registry.make_budget, "ada:flor=1", "unknown option of budget 'ada' 'flor': did you mean"),
]


def test_classes_can_be_registered_again_and_budgets_need_plain_defaults():
    registry.register("recent")(Recent)
    registry.register_budget("uniform")(Uniform)
    with pytest.raises(ConfigError, match="two budgets are called 'uniform'"):
        registry.register_budget("uniform")(
            make_dataclass("Other", [], bases=(Budget,), frozen=True)
        )
    with pytest.raises(ConfigError, match="two policies are called 'recent'"):
        registry.register("recent")(make_dataclass("Other", [], bases=(Recent,), frozen=True))

    nested = make_dataclass(
        "Nested", [("rule", EvictionPolicy, Recent())], bases=(Budget,), frozen=True
    )
    with pytest.raises(ConfigError, match="budget 'odd' is not a dataclass"):
        registry.register_budget("odd")(type("Plain", (Budget,), {}))
    with pytest.raises(ConfigError, match="option 'rule' of budget 'odd' needs a default of type"):
        registry.register_budget("odd")(nested)


def test_schedule_option_names_are_reserved_and_option_values_of_wrong_type_refused():
    for name in ("cap", "every", "when", "budget", "granularity", "chunk_tokens"):
        reserved = make_dataclass("Reserved", [(name, int, 1)], bases=(Recent,), frozen=True)
        expected = f"option '{name}' of policy 'reserved' is reserved for the schedule"
        with pytest.raises(ConfigError, match=expected):
            registry.register("reserved")(reserved)
    for text, message in (
        ("scissorhands:share=yes", "option share needs true or false, got 'yes'"),
        ("rkv:threshold=nan", "option threshold needs a finite number, got 'nan'"),
        ("expected_attention:epsilon=inf", "option epsilon needs a finite number, got 'inf'"),
        ("value_norm:base=full", "'full' retains all tokens and cannot be nested in another rule"),
        ("value_norm:power=long", "option power needs a finite number, got 'long'"),
        ("h2o:recent=1.5", "option recent needs a whole number, got '1.5'"),
    ):
        with pytest.raises(ConfigError, match=message):
            registry.make_policy(text)
