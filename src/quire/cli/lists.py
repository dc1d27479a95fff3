"""Options with several values in one text."""

from quire.errors import ConfigError


def split_texts(text: str, separator: str = ",") -> tuple[str, ...]:
    """Different values in their order, without spaces around them and without empty ones."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(separator) if part.strip()))


def split_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Different whole numbers, separated by commas, in their order.

    Raises:
        ConfigError: a value is no whole number.
    """
    try:
        return tuple(dict.fromkeys(map(int, split_texts(text))))
    except ValueError:
        raise ConfigError(f"expected {flag} as whole numbers such as 1,2, got {text!r}") from None
