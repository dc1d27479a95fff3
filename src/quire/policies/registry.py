"""Names of policies, and how a policy text becomes a policy."""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar

from quire import policies
from quire.errors import ConfigError, UnknownName
from quire.policies.base import EvictionPolicy
from quire.spec.eviction import DEFAULT_EVERY_TOKENS, EvictionSpec, parse_policy

FULL = "full"
SCHEDULE_OPTIONS = ("cap", "every")
_KINDS = (bool, int, float, str)  # an option's type is its default's
_BOOLEANS = {"true": True, "false": False}
P = TypeVar("P", bound=EvictionPolicy)
_POLICIES: dict[str, type[EvictionPolicy]] = {}


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Give a policy class its name.

    Raises:
        ConfigError: the name is taken, or the class is no dataclass whose fields have defaults.
    """

    def put(policy: type[P]) -> type[P]:
        if name in (FULL, *_POLICIES) and _POLICIES.get(name) is not policy:
            raise ConfigError(f"two policies are called {name!r}")
        _check_options(name, policy)
        _POLICIES[name] = policy
        return policy

    return put


def _check_options(name: str, policy: type[EvictionPolicy]) -> None:
    if "__dataclass_fields__" not in vars(policy):
        raise ConfigError(f"policy {name!r} is no dataclass: write @register above @dataclass")
    for declared in fields(policy):  # type: ignore[arg-type]
        if declared.name in SCHEDULE_OPTIONS:
            raise ConfigError(f"option {declared.name!r} of policy {name!r} is the schedule's own")
        if type(declared.default) not in _KINDS:
            kinds = ", ".join(kind.__name__ for kind in _KINDS)
            raise ConfigError(
                f"option {declared.name!r} of policy {name!r} needs a default of type {kinds}"
            )


def registered() -> Mapping[str, type[EvictionPolicy]]:
    """All policies by name; `full` (keep everything) is not a rule and not among them."""
    policies.load_all()
    return dict(sorted(_POLICIES.items()))


@dataclass(frozen=True, slots=True)
class Eviction:
    """A policy with its schedule.

    Attributes:
        policy: None keeps everything.
        spec: how many tokens, when.
    """

    policy: EvictionPolicy | None
    spec: EvictionSpec


def make_eviction(text: str) -> Eviction:
    """Build a policy and its schedule from a policy text.

    Raises:
        UnknownName: the policy or one of its options is not known; offers the nearest names.
        ConfigError: a missing cap, a value of the wrong type, a cap below what the rule protects.
    """
    parsed = parse_policy(text)
    if parsed.name == FULL:
        if parsed.options:
            raise ConfigError(f"'full' keeps everything and has no options, got {text!r}")
        return Eviction(None, EvictionSpec())
    known = registered()
    if parsed.name not in known:
        raise UnknownName("eviction policy", parsed.name, (FULL, *known))
    options = dict(parsed.options)
    if "cap" not in options:
        raise ConfigError(f"policy {text!r} needs a cap in tokens, such as cap=512")
    cap, every = _integer("cap", options.pop("cap")), options.pop("every", None)
    if every is not None:
        spec = EvictionSpec(cap=cap, every=_integer("every", every))
        policy = _make_policy(parsed.name, known[parsed.name], options)
        _check_cap(text, policy, spec)
        return Eviction(policy, spec)
    policy = _make_policy(parsed.name, known[parsed.name], options)
    least = DEFAULT_EVERY_TOKENS + max(1, policy.least_cap)
    if cap < least:
        raise ConfigError(
            f"{text!r}: expected a cap of {least} tokens or more, of which {DEFAULT_EVERY_TOKENS} "
            f"leave at a time, got {cap}"
        )
    return Eviction(policy, EvictionSpec(cap=cap))


def _check_cap(text: str, policy: EvictionPolicy, spec: EvictionSpec) -> None:
    assert spec.cap is not None
    if spec.cap - spec.every < policy.least_cap:
        raise ConfigError(
            f"{text!r} leaves {spec.cap - spec.every} tokens after an eviction "
            f"(cap {spec.cap} - every {spec.every}), but the rule needs {policy.least_cap}; "
            "raise cap or lower every"
        )


def _make_policy(
    name: str, policy: type[EvictionPolicy], options: Mapping[str, str]
) -> EvictionPolicy:
    declared: dict[str, Field[Any]] = {f.name: f for f in fields(policy)}  # type: ignore[arg-type]
    values = {}
    for key, value in options.items():
        if key not in declared:
            raise UnknownName(f"option of policy {name!r}", key, (*declared, *SCHEDULE_OPTIONS))
        values[key] = _convert(key, value, declared[key])
    return policy(**values)


def _convert(key: str, value: str, declared: Field[Any]) -> object:
    kind: type[Any] = type(declared.default)
    if kind is bool:
        if value not in _BOOLEANS:
            raise ConfigError(f"option {key} needs true or false, got {value!r}")
        return _BOOLEANS[value]
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"option {key} needs a {kind.__name__}, got {value!r}") from None


def _integer(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"option {key} needs a whole number of tokens, got {value!r}") from None
