"""What a researcher writes beside a model, as the one text that the engine reads too."""

from quire.errors import ConfigError, UnsoundCombination
from quire.policies.eviction import EvictionRule, make_eviction
from quire.policies.registry import FULL


def make_rule(
    policy: object, budget: int | str | None, when: str | None, every: int | None
) -> EvictionRule:
    """Put the parts together and check them.

    Args:
        policy: such as `h2o:recent=64`.
        budget: of a lane, as `cap` in a policy text: tokens, "25%" of the prompt, or "2MiB".
        when: a schedule.
        every: tokens that leave at a time.

    Raises:
        ConfigError: a part given twice or missing, an unknown name, a budget below what the rule
            protects.
    """
    if not isinstance(policy, str):
        raise ConfigError(f"expected policy to be a text such as 'h2o:recent=64', got {policy!r}")
    if policy.strip() == FULL and budget is None:
        raise_for = {"when": when, "every": every}
        given = [name for name, value in raise_for.items() if value is not None]
        if given:
            raise ConfigError(f"'full' keeps everything: {', '.join(given)} would change nothing")
        return make_eviction(FULL)
    parts = {"cap": budget, "when": when, "every": every}
    options = [f"{name}={value}" for name, value in parts.items() if value is not None]
    if not options:
        return make_eviction(policy)
    separator = "," if ":" in policy else ":"
    return make_eviction(policy + separator + ",".join(options))


def refuse_renumbering(rule: EvictionRule) -> None:
    """Refuse rules that store keys before RoPE: `model.generate` gives them after it.

    Raises:
        UnsoundCombination: with what to use instead.
    """
    if rule.policy is not None and rule.policy.renumbers:
        raise UnsoundCombination(
            f"{rule.text!r} stores keys before RoPE, and inside Transformers they come after it, at"
            " the positions that model.generate counts; use quire.LLM, or 'sinks', which keeps the "
            "same tokens at the positions they had"
        )
