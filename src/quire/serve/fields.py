"""Request fields that the server does not read: ignored, unsupported or unknown.

    ignored       does not change the output: accepted with any value
    unsupported   changes the output: refused, except null and values without an effect
    near miss     similar to the name of a known field: refused, with that name
    unknown       all others: refused, or ignored with a log line and a response header

The server and `quire batch` use the same lists.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from quire.errors import RequestError

IGNORED = frozenset(
    {"user", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention", "request_id", "session_id", "chat_id"}
    | {"message_id"}
)
"""Fields that do not change the output of this server."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # tools and output formats
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": ({},),
    "output_config": ({},),
    "output_format": (),
    "parallel_tool_calls": (True, False),
    "regex": ("",),
    "structural_tag": (),
    "tool_choice": ("none", "auto"),
    "tool_ids": ([],),
    "tools": ([],),
    # media and reasoning
    "audio": (),
    "images": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prediction": (),
    "reasoning_effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "verbosity": ("medium",),
    "web_search_options": (),
    # prompts
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "extra_body": ({},),
    "messages": ([],),
    "negative_prompt": ("",),
    "prompt": ("", []),
    "suffix": ("",),
    # sampling
    "bad_words_ids": ([],),
    "diversity_penalty": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "encoder_repetition_penalty": (1,),
    "eos_token_id": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "logits_processors": ([],),
    "max_length": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_predict": (),
    "num_return_sequences": (1,),
    "options": ({},),
    "penalty_alpha": (0,),
    "random_seed": (),
    "repeat_penalty": (1,),
    "smoothing_factor": (0,),
    "stop_sequences": ([],),
    "suppress_tokens": ([],),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical": (1,),
    "typical_p": (1,),
    "watermark": (False,),
    "xtc_probability": (0,),
    # contents of the response
    "kv_transfer_params": ({},),
    "n_probs": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "top_logprobs": (0,),
}
"""Unsupported fields that change the output, each with its values without an effect.

A field of one endpoint is unsupported on the other endpoints.
"""

INSTEAD: Mapping[str, str] = {
    "bad_words_ids": "bad_token_ids",
    "ebnf": "structured_outputs",
    "grammar": "structured_outputs",
    "json_schema": "structured_outputs",
    "output_config": "response_format",
    "output_format": "response_format",
    "regex": "structured_outputs",
    "structural_tag": "structured_outputs",
    "eos_token_id": "stop_token_ids",
    "function_call": "tool_choice",
    "functions": "tools",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_beams": "beam_width",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "suppress_tokens": "bad_token_ids",
    "top_logprobs": "logprobs",
}
"""Field names of other servers, and the equivalent field of this server."""


MAX_NAMES = 20
MAX_NAME_CHARACTERS = 64
MAX_EXTRA_FIELDS = 64
"""Limit of undeclared fields in one object: each is compared with all known names."""

_NEAR = 0.8


def unknown_fields(
    extra: Mapping[str, object], known: Iterable[str], *, inside: str = ""
) -> list[str]:
    """Names in `extra` that are neither known, ignored nor unsupported."""
    if len(extra) > MAX_EXTRA_FIELDS:
        raise RequestError(
            f"expected at most {MAX_EXTRA_FIELDS} unknown fields, got {len(extra)}: leave them out"
        )
    others = {name: value for name, value in extra.items() if value is not None}
    declared = tuple(known)
    if inside:
        return _refuse_near_misses(others, declared, inside)
    for name, value in others.items():
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise _unsupported(name, declared)
    names = [name for name in others if name not in IGNORED and name not in UNSUPPORTED]
    return _refuse_near_misses(names, (*declared, *IGNORED, *UNSUPPORTED))


def temperature_of(do_sample: object, temperature: object) -> object:
    """The temperature of a request; `do_sample` false means 0, as in Transformers."""
    if do_sample is not None and not isinstance(do_sample, bool):
        raise RequestError("`do_sample` must be true or false", param="do_sample")
    if do_sample is not False:
        return temperature
    if temperature:
        raise RequestError(
            f"`do_sample` false means `temperature` 0, got `temperature` {temperature!r:.40}: "
            "leave one of them out",
            param="do_sample",
        )
    return 0.0


def refusal(name: str) -> RequestError:
    """The error for an unknown field without a similar known name."""
    shown = shown_name(name)
    return RequestError(f"unknown field `{shown}`: leave it out", param=shown)


def shown_name(name: str) -> str:
    """A field name from a client in printable ASCII, truncated; quoted if spaces are at its ends.

    HTTP does not allow spaces at the ends of a header.
    """
    shown = name[:MAX_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    shown = shown[:MAX_NAME_CHARACTERS]
    return shown if shown and shown == shown.strip() else f"'{shown}'"


def listed(names: Sequence[str]) -> str:
    """Comma-separated names for a log line or a header: truncated, in printable ASCII."""
    shown = [shown_name(name) for name in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"and {len(names) - MAX_NAMES} more")
    return ", ".join(shown)


def _unsupported(name: str, declared: tuple[str, ...]) -> RequestError:
    instead = INSTEAD.get(name)
    hint = f"use `{instead}`" if instead in declared else "leave it out"
    if name in ("extra_body", "options"):  # for fields of the top level
        hint = "send its fields at the top level of the body"
    return RequestError(f"`{name}` is not supported: {hint}", param=name)


def _refuse_near_misses(
    names: Iterable[str], choices: tuple[str, ...], inside: str = ""
) -> list[str]:
    """Refuse names that are similar to a field that changes the output; return names with path."""
    found = []
    for name in names:
        near = nearest(name[: MAX_NAME_CHARACTERS + 1], choices)
        if near is not None and near not in IGNORED:
            shown = inside + shown_name(name)
            raise RequestError(f"unknown field `{shown}`: did you mean `{near}`?", param=shown)
        found.append(inside + name)
    return found


@lru_cache(maxsize=4096)
def nearest(name: str, choices: tuple[str, ...]) -> str | None:
    """The most similar choice; None if no choice is similar.

    Case, dashes and underscores are ignored: `maxTokens` equals `max_tokens`.
    """
    if len(name) > MAX_NAME_CHARACTERS:
        return None
    squashed = {_squashed(choice): choice for choice in reversed(choices)}
    found = difflib.get_close_matches(_squashed(name), squashed, n=1, cutoff=_NEAR)
    return squashed[found[0]] if found else None


def _squashed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
