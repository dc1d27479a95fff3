"""The name of the cache in Transformers: `cache` from 5.24 on, `past_key_values` before.

From 5.24 on, a forward with the former name prints a FutureWarning. Models outside of Transformers
may have either name in every version, so that the name is read from the forward's signature.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(parameters: Collection[str]) -> str | None:
    """The parameter of a forward that takes the cache; None if it has none."""
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def output_with_cache(logits: object, cache: object) -> CausalLMOutputWithPast:
    """The output of a forward, with the cache under this version's name."""
    name = cache_argument([field.name for field in fields(CausalLMOutputWithPast)])
    arguments: dict[str, Any] = {"logits": logits, str(name): cache}
    return CausalLMOutputWithPast(**arguments)
