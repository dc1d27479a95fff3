"""What a researcher writes beside a model, as the one text that the engine reads too."""

from quire.errors import ConfigError, UnsoundCombination
from quire.layout.eviction import parse_policy
from quire.policies.eviction import EvictionRule, make_eviction
from quire.policies.registry import FULL


def make_rule(
    policy: object,
    budget: int | str | None,
    when: str | None,
    every: int | None,
    compression_ratio: float | None = None,
) -> EvictionRule:
    """Put the parts together and check them.

    Args:
        policy: such as `h2o:recent=64`.
        budget: of a lane, as `cap` in a policy text: tokens, "25%" of the prompt, or "2MiB".
        when: a schedule.
        every: tokens that leave at a time.
        compression_ratio: in place of `budget`, the fraction of the prompt that is removed; 0
            keeps everything.

    Raises:
        ConfigError: a part given twice or missing, an unknown name, a budget below what the rule
            protects.
    """
    if not isinstance(policy, str):
        raise ConfigError(f"expected policy to be a text such as 'h2o:recent=64', got {policy!r}")
    if compression_ratio is not None:
        ratio = _checked_ratio(compression_ratio, policy, budget)
        return _of_ratio(policy, ratio, when, every)
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


def _checked_ratio(ratio: object, policy: str, budget: object) -> float:
    if not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise ConfigError(
            "expected compression_ratio to be the fraction of the prompt to remove, at least 0 and "
            f"below 1, got {ratio!r}"
        )
    if budget is not None or "cap" in parse_policy(policy).options:
        named = f"cap= in policy={policy!r}" if budget is None else f"budget={budget!r}"
        raise ConfigError(
            f"expected either {named} or compression_ratio={ratio!r}, got both: each says how many "
            "tokens stay; remove one"
        )
    return ratio


def _of_ratio(policy: str, ratio: float, when: str | None, every: int | None) -> EvictionRule:
    """The rule that removes this fraction of the prompt."""
    if policy.strip() == FULL:
        if ratio:
            raise ConfigError(
                f"'full' keeps everything, got compression_ratio={ratio}; name an eviction policy "
                "such as 'snapkv'"
            )
        return make_rule(policy, None, when, every)
    if not ratio:
        make_rule(policy, "100%", when, every)  # refuses what it would refuse at any ratio
        return make_eviction(FULL)
    retained = f"{100 * (1 - ratio):.9f}".rstrip("0").rstrip(".")
    return make_rule(policy, f"{retained}%", when, every)


def refuse_rerotation(rule: EvictionRule) -> None:
    """Refuse rules that store keys before RoPE: `model.generate` gives them after it.

    Raises:
        UnsoundCombination: with what to use instead.
    """
    if rule.policy is not None and rule.policy.rerotates_keys:
        raise UnsoundCombination(
            f"{rule.text!r} stores keys before RoPE, and inside Transformers they come after it, at"
            " the positions that model.generate counts; use quire.LLM, or 'sinks', which keeps the "
            "same tokens at the positions they had"
        )
