"""How an eviction policy is written: `name:option=value,option=value`, parentheses nest.

The same text works on the command line, in TOML, in a request body and in Python:

    full                                  keep everything
    recent:cap=512,every=64,sinks=4       at most 512 tokens a lane, 64 leave at a time

`cap` and `every` say how much stays and when the rule runs; all else belongs to the rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ConfigError

DEFAULT_EVERY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A parsed policy: a name and its options, values still text."""

    name: str
    options: Mapping[str, str]


def parse_policy(text: str) -> PolicyText:
    """Split a policy text into its name and options.

    Raises:
        ConfigError: no name, an option without a value or given twice, unbalanced parentheses.
    """
    name, _, rest = text.strip().partition(":")
    if not name.isidentifier():
        raise ConfigError(f"expected a policy such as 'recent:cap=512,sinks=4', got {text!r}")
    options: dict[str, str] = {}
    for part in _split_outside_parentheses(rest) if rest else ():
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key or not value:
            raise ConfigError(f"expected option=value in policy {text!r}, got {part!r}")
        if key in options:
            raise ConfigError(f"option {key!r} stands twice in policy {text!r}")
        options[key] = value
    return PolicyText(name, options)


def _split_outside_parentheses(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise ConfigError(f"parentheses do not match in policy options {text!r}")
    return [*parts, text[start:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSpec:
    """How many tokens a lane may hold and how many leave at a time, while prompts are read too.

    A lane that holds `cap` tokens gives up `every` of them before the next token is processed; a
    prompt's first chunk goes up to the cap, the following chunks are `every` tokens or the rest.
    So no lane ever holds more than `cap`. Source: Batch-Max, Algorithm 1.

    Attributes:
        cap: most tokens of a lane, everything counted; None keeps all (no eviction).
        every: tokens that leave at a time, p in the paper.
    """

    cap: int | None = None
    every: int = DEFAULT_EVERY_TOKENS

    def __post_init__(self) -> None:
        if self.cap is None:
            return
        if not 1 <= self.every < self.cap:
            raise ConfigError(
                f"expected 1 <= every < cap, got every={self.every}, cap={self.cap}; "
                "`every` tokens leave a lane at a time and some must stay"
            )

    def peak_tokens(self, tokens: int) -> int:
        """Most tokens a lane holds while a sequence grows to `tokens`."""
        return tokens if self.cap is None else min(tokens, self.cap)
