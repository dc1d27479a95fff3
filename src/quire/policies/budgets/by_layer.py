"""Caps of layers set by hand, from measurements; not from a paper.

Either tokens or relative sizes; `x` repeats:

    budget=(by_layer:caps=768x4/256x4)       four layers of 768 tokens, then four of 256
    budget=(by_layer:factors=1.5x4/0.5x4)    the same at cap=512, in proportion at any other cap
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from quire.errors import ConfigError
from quire.policies.budgets.base import Budget, Shape, share_out
from quire.policies.registry import register_budget

# few digits: the texts come from requests, and a number such as 1e-999999999 would exhaust memory
_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:x([1-9]\d{0,2}))?", re.ASCII)


def read_numbers(text: str) -> list[Fraction] | None:
    """Read numbers with `/` between them; `8x4` means 8 four times. None: another form."""
    parts = [_NUMBER.fullmatch(part.strip()) for part in text.split("/")]
    if not all(parts):
        return None
    return [Fraction(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


@register_budget("by_layer")
@dataclass(frozen=True, slots=True)
class ByLayer(Budget):
    """Caps as written, one for each layer that evicts; `8x4` means 8 four times.

    Attributes:
        caps: tokens, with `/` between layers; their mean must be the cap.
        factors: relative sizes, instead of `caps`.
    """

    example = "factors=1.2x4/0.8x4"

    caps: str = ""
    factors: str = ""

    def __post_init__(self) -> None:
        if bool(self.caps) == bool(self.factors):
            raise ConfigError("budget by_layer needs caps=512/256/... or factors=1.5/0.5/...")
        self._numbers()

    @property
    def in_tokens(self) -> bool:
        return bool(self.caps)

    def min_cap(self, shape: Shape) -> int:
        numbers = self._numbers()
        return ceil(shape.least * sum(numbers) / (len(numbers) * min(numbers)))

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        numbers = self._numbers()
        if len(numbers) != shape.num_layers:
            raise ConfigError(
                f"budget by_layer: expected {shape.num_layers} layers, which evict in this model, "
                f"got {len(numbers)}"
            )
        total = shape.num_layers * shape.cap
        if self.caps and sum(numbers) != total:
            raise ConfigError(
                f"budget by_layer: expected caps with the sum {total} ({shape.num_layers} layers "
                f"times cap={shape.cap}), got {sum(numbers)}; change them, or set "
                f"cap={float(sum(numbers) / shape.num_layers):g}"
            )
        return shape.of_layers(share_out(total, numbers))

    def _numbers(self) -> list[Fraction]:
        """One number per layer."""
        numbers = read_numbers(self.caps or self.factors)
        if not numbers or min(numbers) <= 0 or ("." in self.caps):
            raise ConfigError(
                "expected numbers above 0 with / between layers, such as 512x2/256x2, got "
                f"{self.caps or self.factors!r}"
            )
        return numbers
