"""A cap as a user writes it: tokens, a share of the prompt, or bytes; resolved at admission."""

from dataclasses import dataclass

from quire.errors import ConfigError

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}

MOST = 1 << 40
"""More tokens or bytes than any cap needs; a number below it fits wherever numbers are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """One of three.

    Attributes:
        tokens: of a lane.
        share: of the prompt's tokens, above 0.
        num_bytes: of a whole sequence in the layers that evict, in whole pages, positions and
            what a rule remembers included.
    """

    tokens: int | None = None
    share: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Cap":
        """Read `512`, `25%`, `0.25` or `2MiB`.

        Raises:
            ConfigError: neither.
        """
        text = text.strip()
        unit = next((unit for unit in ("%", *_UNITS) if text.endswith(unit)), "")
        try:
            number = _number(text.removesuffix(unit), unit)
        except (ValueError, OverflowError):
            raise ConfigError(
                f"expected a cap such as 512 (tokens), 25% or 0.25 (of the prompt) or 2MiB, got "
                f"{text!r}"
            ) from None
        if isinstance(number, float):
            return cls._of_share(number, text)
        number = _positive(number, text)
        return cls(num_bytes=number) if unit else cls(tokens=number)

    @classmethod
    def _of_share(cls, share: float, text: str) -> "Cap":
        if not 0 < share <= 1:
            raise ConfigError(
                f"a cap of {text} is no part of the prompt: expected more than 0 and up to 100%, "
                "or whole tokens such as 512"
            )
        return cls(share=share)

    def resolve(
        self, prompt_tokens: int, *, page_tokens: int, page_bytes: int, fixed_bytes: int
    ) -> int:
        """Tokens of a lane; 0 where bytes hold not one page of every lane.

        Args:
            prompt_tokens: of the request.
            page_tokens: slots of a page.
            page_bytes: of one page in each lane that evicts, with those of what is remembered of
                its slots.
            fixed_bytes: of what is remembered of a sequence however long it is.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return max(1, int(self.share * prompt_tokens))
        assert self.num_bytes is not None, "a cap is one of three"
        return max(0, self.num_bytes - fixed_bytes) // page_bytes * page_tokens


def _number(text: str, unit: str) -> int | float:
    """Tokens or bytes, whole; a share as a float."""
    if unit == "%":
        return float(text) / 100
    if unit:
        return int(float(text) * _UNITS[unit])
    return float(text) if "." in text else int(text)


def _positive(number: int, text: str) -> int:
    if not 1 <= number <= MOST:
        raise ConfigError(f"expected a cap from 1 to {MOST:,}, got {text}")
    return number
