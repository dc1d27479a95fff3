"""The prompts of a body: texts or token ids, one or several."""

from typing import Any


def checked_prompts(value: object) -> object:
    """Check the four formats in one pass; a union would report every element four times.

    Raises:
        ValueError: another format.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _is_uniform(value)):
        return value
    raise ValueError(
        "expected a text, a list of texts, a list of token ids or a list of lists of token ids, "
        "without empty lists"
    )


def as_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a checked field, which may be a single prompt."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _is_uniform(prompt: list[object]) -> bool:
    if isinstance(prompt[0], list):
        return all(isinstance(ids, list) and ids and are_ids(ids) for ids in prompt)
    return all(isinstance(text, str) for text in prompt) or are_ids(prompt)


def are_ids(values: list[object]) -> bool:
    """Whether all values are integers, and no booleans."""
    return all(type(value) is int for value in values)
