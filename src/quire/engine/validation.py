"""What must hold of a request before it is queued."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel

MOST_SALT_CHARACTERS = 128


def checked_prompt(prompt_token_ids: Sequence[int], spec: ModelSpec) -> list[int]:
    """The prompt as a list of valid ids; see `check_context` for how many.

    Raises:
        RequestError: empty, or with an id outside the vocabulary.
    """
    try:
        prompt = [operator.index(i) for i in prompt_token_ids]
    except TypeError as error:
        raise RequestError(
            f"a prompt is a list of whole token ids: {error}", param="prompt"
        ) from None
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    wrong = [i for i in prompt if not 0 <= i < spec.vocab_size]
    if wrong:
        raise RequestError(
            f"token ids must be whole numbers from 0 to {spec.vocab_size - 1}, got {wrong[:5]}",
            param="prompt",
        )
    return prompt


def check_context(prompt_tokens: int, context_tokens: int) -> None:
    """Refuse a prompt that is longer than the context.

    Raises:
        RequestError: with both numbers.
    """
    if prompt_tokens > context_tokens:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, the model's context {context_tokens}; shorten "
            "the prompt",
            param="prompt",
        )


def checked_salt(salt: str) -> str:
    """What a caller adds to the identity of its cached prefixes.

    Raises:
        RequestError: too long, or with characters that cannot be seen.
    """
    if len(salt) > MOST_SALT_CHARACTERS:
        raise RequestError(
            f"expected a cache_salt of {MOST_SALT_CHARACTERS} characters at most, got {len(salt)}",
            param="cache_salt",
        )
    if not salt.isprintable():
        raise RequestError(
            "expected a cache_salt of printable characters, without control characters or line "
            f"breaks, got {salt!r}",
            param="cache_salt",
        )
    return salt


def checked_deadline(deadline_s: float | None) -> float:
    """Seconds until an answer is wanted; infinity where nobody says.

    Raises:
        RequestError: no time from now on.
    """
    if deadline_s is None:
        return math.inf
    if not 0 < deadline_s < math.inf:
        raise RequestError(
            f"expected deadline_s above 0, in seconds from now, got {deadline_s}; leave it out "
            "where the answer may come at any time",
            param="deadline_s",
        )
    return deadline_s


def checked_params(
    params: SamplingParams, prompt_tokens: int, model: LoadedModel, context_tokens: int
) -> SamplingParams:
    """Options with the model's defaults filled in and the context respected.

    An answer ends with "length" where the context ends: `max_tokens` is lowered to what is left.

    Args:
        params: as asked.
        prompt_tokens: of the request.
        model: whose defaults and vocabulary count.
        context_tokens: of the longest sequence.

    Raises:
        RequestError: options that do not fit the vocabulary, or no room for even one token.
    """
    resolved = params.resolve(model.generation)
    resolved.validate_for(model.spec.vocab_size)
    room = context_tokens - prompt_tokens
    if resolved.max_tokens and not room:
        raise RequestError(
            f"the prompt's {prompt_tokens} tokens fill the model's whole context: there is no room "
            "for an answer; shorten the prompt",
            param="prompt",
        )
    if resolved.max_tokens <= room:
        return resolved
    return replace(resolved, max_tokens=room, min_tokens=min(resolved.min_tokens, room))
