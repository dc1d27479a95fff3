"""What must hold of a request before it is queued."""

import operator
from collections.abc import Sequence
from dataclasses import replace

from quire.engine.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.models.loader import LoadedModel
from quire.spec.model import ModelSpec

MOST_SALT_CHARACTERS = 128


def checked_prompt(prompt_token_ids: Sequence[int], spec: ModelSpec) -> list[int]:
    """The prompt as a list of valid ids.

    Raises:
        RequestError: empty, over the context, or with an id outside the vocabulary.
    """
    try:
        prompt = [operator.index(i) for i in prompt_token_ids]
    except TypeError as error:
        raise RequestError(f"a prompt is a list of whole token ids: {error}") from None
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    if len(prompt) > spec.max_positions:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the model's context {spec.max_positions}; "
            "shorten the prompt"
        )
    wrong = [i for i in prompt if not 0 <= i < spec.vocab_size]
    if wrong:
        raise RequestError(
            f"token ids must be whole numbers from 0 to {spec.vocab_size - 1}, got {wrong[:5]}"
        )
    return prompt


def checked_salt(salt: str) -> str:
    """What a caller adds to the identity of its cached prefixes.

    Raises:
        RequestError: too long, or with characters that cannot be seen.
    """
    if len(salt) > MOST_SALT_CHARACTERS:
        raise RequestError(
            f"expected a cache_salt of {MOST_SALT_CHARACTERS} characters at most, got {len(salt)}"
        )
    if not salt.isprintable():
        raise RequestError(
            "expected a cache_salt of printable characters, without control characters or line "
            f"breaks, got {salt!r}"
        )
    return salt


def checked_params(
    params: SamplingParams, prompt_tokens: int, model: LoadedModel
) -> SamplingParams:
    """Options with the model's defaults filled in and the context respected.

    An answer ends with "length" where the context ends: `max_tokens` is lowered to what is left.

    Raises:
        RequestError: options that do not fit the vocabulary, or no room for even one token.
    """
    resolved = params.resolve(model.generation)
    resolved.validate_for(model.spec.vocab_size)
    room = model.spec.max_positions - prompt_tokens
    if resolved.max_tokens and not room:
        raise RequestError(
            f"the prompt's {prompt_tokens} tokens fill the model's whole context: there is no room "
            "for an answer; shorten the prompt"
        )
    if resolved.max_tokens <= room:
        return resolved
    return replace(resolved, max_tokens=room, min_tokens=min(resolved.min_tokens, room))
