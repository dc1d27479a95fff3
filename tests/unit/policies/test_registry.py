"""Rules and budgets by name: from this package, from others, and what cannot be registered."""

from dataclasses import dataclass
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


@pytest.fixture
def as_new(monkeypatch):
    """What is registered meanwhile is forgotten, and entry points are looked at again."""
    monkeypatch.setattr(registry, "_POLICIES", dict(registry.registered()))
    monkeypatch.setattr(registry, "_BUDGETS", dict(registry.registered_budgets()))
    monkeypatch.setattr(registry, "_loaded", set())


def publish(monkeypatch, group: str, code: str, name: str = "their_rules") -> None:
    """Another distribution is installed, whose entry point names a module of this code."""
    module = ModuleType(name)

    def load(entry: EntryPoint) -> ModuleType:
        monkeypatch.setitem(registry.importlib.sys.modules, name, module)
        exec(code, module.__dict__)
        return module

    entry = EntryPoint(name=name, value=f"{name}.module", group=group)
    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(
        registry, "entry_points", lambda *, group: [entry] if group == entry.group else []
    )


THEIR_RULE = """
from dataclasses import dataclass
from quire.policies.recent import Recent
from quire.policies.registry import register

@register("theirs")
@dataclass(frozen=True, slots=True)
class Theirs(Recent):
    more: int = 3
"""
THEIR_BUDGET = """
from dataclasses import dataclass
from quire.policies.budgets.base import Budget
from quire.policies.registry import register_budget

@register_budget("their_budget")
@dataclass(frozen=True, slots=True)
class Theirs(Budget):
    more: int = 3
"""


@pytest.mark.usefixtures("as_new")
def test_rules_of_installed_packages_are_found(monkeypatch) -> None:
    publish(monkeypatch, "quire.policies", THEIR_RULE)

    assert "theirs" in registry.registered()
    assert registry.make_policy("theirs:more=5,sinks=2").more == 5
    assert "their_budget" not in registry.registered_budgets()


@pytest.mark.usefixtures("as_new")
def test_budgets_of_installed_packages_are_found(monkeypatch) -> None:
    publish(monkeypatch, "quire.budgets", THEIR_BUDGET)

    assert registry.make_budget("their_budget:more=5").more == 5


@pytest.mark.usefixtures("as_new")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        (THEIR_RULE.replace("theirs", "recent"), "two policies are called 'recent'"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(monkeypatch, code: str, says: str) -> None:
    publish(monkeypatch, "quire.policies", code)

    with pytest.raises(ConfigError) as refused:
        registry.registered()

    assert "the eviction rules of 'their_rules.module'" in str(refused.value)
    assert "group quire.policies" in str(refused.value)
    assert says in str(refused.value)


def test_every_rule_and_budget_is_sorted_by_name_and_full_is_none_of_them() -> None:
    assert list(registry.registered()) == sorted(registry.registered())
    assert list(registry.registered_budgets()) == sorted(registry.registered_budgets())
    assert "full" not in registry.registered()
    assert registry.registered_budgets()["uniform"] is Uniform


def test_nested_rules_are_read_with_and_without_parentheses() -> None:
    plain = registry.make_policy("value_norm:base=h2o")
    options = registry.make_policy("value_norm:base=(h2o:recent=3,heads=max),power=2")
    twice = registry.make_policy("value_norm:base=(value_norm:base=(recent:sinks=2))")

    assert plain == ValueNorm(base=H2O())
    assert options == ValueNorm(base=H2O(recent=3, heads="max"), power=2.0)
    assert twice == ValueNorm(base=ValueNorm(base=Recent(sinks=2)))


def test_a_name_that_is_not_known_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown eviction policy 'h20': did you mean h2o"):
        registry.make_policy("h20")
    with pytest.raises(UnknownName, match="unknown eviction budget 'pyramide': did you mean"):
        registry.make_budget("pyramide")
    with pytest.raises(UnknownName, match="unknown option of budget 'ada' 'flor': did you mean"):
        registry.make_budget("ada:flor=1")


@pytest.mark.usefixtures("as_new")
def test_the_same_class_may_be_registered_again_and_another_may_not() -> None:
    registry.register("recent")(Recent)
    registry.register_budget("uniform")(Uniform)

    @dataclass(frozen=True)
    class Other(Budget):
        pass

    with pytest.raises(ConfigError, match="two budgets are called 'uniform'"):
        registry.register_budget("uniform")(Other)


@pytest.mark.usefixtures("as_new")
@pytest.mark.parametrize("name", ["cap", "every", "when", "budget", "granularity", "chunk_tokens"])
def test_a_rule_may_not_take_an_option_of_the_schedule(name: str) -> None:
    taken = dataclass(frozen=True)(
        type("Taken", (Recent,), {"__annotations__": {name: int}, name: 1})
    )

    with pytest.raises(
        ConfigError, match=f"option '{name}' of policy 'taken' is reserved for the schedule"
    ):
        registry.register("taken")(taken)


@pytest.mark.usefixtures("as_new")
def test_a_budget_that_is_no_dataclass_of_plain_defaults_is_refused() -> None:
    class Plain(Budget):
        pass

    @dataclass(frozen=True)
    class Nested(Budget):
        rule: EvictionPolicy = Recent()  # noqa: RUF009 - frozen

    with pytest.raises(ConfigError, match="budget 'odd' is not a dataclass"):
        registry.register_budget("odd")(Plain)
    with pytest.raises(ConfigError, match="option 'rule' of budget 'odd' needs a default of type"):
        registry.register_budget("odd")(Nested)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scissorhands:share=yes", "option share needs true or false, got 'yes'"),
        ("rkv:threshold=nan", "option threshold needs a finite number, got 'nan'"),
        ("expected_attention:epsilon=inf", "option epsilon needs a finite number, got 'inf'"),
        ("value_norm:base=full", "'full' retains all tokens and cannot be nested in another rule"),
        ("value_norm:power=long", "option power needs a finite number, got 'long'"),
        ("h2o:recent=1.5", "option recent needs a whole number, got '1.5'"),
    ],
)
def test_values_are_of_the_option_s_type(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.make_policy(text)
