"""Scores of one output, 0 to 1: exact answers, and answers found."""

from collections.abc import Sequence


def starts_with(output: str, reference: str) -> float:
    """1 if the output begins with the reference."""
    return float(output.startswith(reference))


def fraction_found(output: str, references: Sequence[str]) -> float:
    """Fraction of the references that the output contains, ignoring case (RULER)."""
    lowered = output.lower()
    return sum(one.lower() in lowered for one in references) / len(references)
