"""Fields of a request that the server does not read: which are ignored, refused or unknown.

    ignored       does not change the output: accepted with any value
    unsupported   changes the output: refused, except null and values that ask for nothing
    near miss     nearly spells a known field: refused, with the name that was probably meant
    unknown       any other: refused, or ignored with a log line and a response header

The server and `quire batch` use the same lists.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from quire.errors import RequestError

IGNORED = frozenset(
    {"user", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
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
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": ({},),
    "regex": ("",),
    "response_format": ({"type": "text"},),
    "structural_tag": (),
    "structured_outputs": (),
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
    "truncate_prompt_tokens": (),
    # sampling
    "bad_words": ([],),
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
    # what a response carries
    "kv_transfer_params": ({},),
    "n_probs": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "top_logprobs": (0,),
}
"""Fields that change the output and are not supported, each with the values that ask for nothing.

A field that one endpoint reads is unsupported on the others: a body's own fields never get here.
"""

INSTEAD: Mapping[str, str] = {
    "bad_words_ids": "bad_token_ids",
    "eos_token_id": "stop_token_ids",
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
"""Names that other servers use, and the field of this server that does the same."""

NESTED = frozenset({"extra_body", "options"})
"""Objects that clients put fields into which belong into the body itself."""

MOST_NAMES = 20
MOST_NAME_CHARACTERS = 64
MOST_EXTRA_FIELDS = 64
"""Fields beyond the declared ones in one object: each is compared with all known names."""

_NEAR = 0.8


def unknown_fields(
    extra: Mapping[str, object], known: Iterable[str], *, inside: str = ""
) -> list[str]:
    """Names among `extra` that are neither known, ignored nor unsupported.

    Args:
        extra: fields of a body that its model does not declare.
        known: fields that it declares.
        inside: the place that holds them, such as "stream_options."; "" for the body itself.

    Raises:
        RequestError: an unsupported field, one that nearly spells a known one, or too many.
    """
    if len(extra) > MOST_EXTRA_FIELDS:
        raise RequestError(
            f"{len(extra)} fields are unknown, expected {MOST_EXTRA_FIELDS} at most: leave them out"
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
    """The temperature of a request, where `do_sample` false stands for 0 as in Transformers.

    Args:
        do_sample: of the request; None where it does not say.
        temperature: likewise.

    Raises:
        RequestError: `do_sample` is neither true nor false, or is false beside a temperature that
            is not 0.
    """
    if do_sample is not None and not isinstance(do_sample, bool):
        raise RequestError("`do_sample` must be true or false", param="do_sample")
    if do_sample is not False:
        return temperature
    if temperature:
        raise RequestError(
            f"`do_sample` false stands for `temperature` 0, got `temperature` {temperature!r:.40}: "
            "leave one of them out",
            param="do_sample",
        )
    return 0.0


def refusal(name: str) -> RequestError:
    """The refusal of a field that is not like any other."""
    shown = shown_name(name)
    return RequestError(f"unknown field `{shown}`: leave it out", param=shown)


def shown_name(name: str) -> str:
    """A client's own name in printable ASCII, cut where it is too long."""
    shown = name[:MOST_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return shown[:MOST_NAME_CHARACTERS]


def listed(names: Sequence[str]) -> str:
    """Names for a log line or a header: bounded, in printable ASCII, with commas."""
    shown = [shown_name(name) for name in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        shown.append(f"and {len(names) - MOST_NAMES} more")
    return ", ".join(shown)


def _unsupported(name: str, declared: tuple[str, ...]) -> RequestError:
    instead = INSTEAD.get(name)
    hint = f"use `{instead}`" if instead in declared else "leave it out"
    if name in NESTED:
        hint = "write its fields into the body itself"
    return RequestError(f"`{name}` is not supported here: {hint}", param=name)


def _refuse_near_misses(
    names: Iterable[str], choices: tuple[str, ...], inside: str = ""
) -> list[str]:
    """The names with their place: none of them nearly spells a field that changes the output.

    Raises:
        RequestError: one does.
    """
    found = []
    for name in names:
        near = nearest(name[: MOST_NAME_CHARACTERS + 1], choices)
        if near is not None and near not in IGNORED:
            shown = inside + shown_name(name)
            raise RequestError(f"unknown field `{shown}`: did you mean `{near}`?", param=shown)
        found.append(inside + name)
    return found


@lru_cache(maxsize=4096)
def nearest(name: str, choices: tuple[str, ...]) -> str | None:
    """The choice that a name nearly spells; None where there is none.

    Case, dashes and underscores do not count: `maxTokens` is `max_tokens`.
    """
    if len(name) > MOST_NAME_CHARACTERS:
        return None
    squashed = {_squashed(choice): choice for choice in reversed(choices)}
    found = difflib.get_close_matches(_squashed(name), squashed, n=1, cutoff=_NEAR)
    return squashed[found[0]] if found else None


def _squashed(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
