"""Outputs of a request: several of a prompt, sampling options, structure, log-probabilities."""

import re

from composition.feature import Feature, setting
from composition.ran import Ran

FORCED = 53
"""The token "5", which the pattern and the allowed tokens have too."""

ALLOWED = [*b"abcd-0123456789efg"]
STOPS = "efghijklm789"
PATTERN = "[a-d]{2}-[0-9]{3,36}"
BEGUN = "[a-d]{0,2}|[a-d]{2}-[0-9]{0,36}"


def _several(ran: Ran) -> bool:
    several = all(len(choices) > 1 for choices in ran.outputs)
    return several and ran.happened("shared", "copied")


def _ranked(ran: Ran) -> bool:
    return all(choice.score is not None for choices in ran.outputs for choice in choices)


def _not_the_likeliest(ran: Ran) -> bool:
    """Some token is not the one with the highest logit."""
    found = {(context[0], int(row.argmax())) for context, row in ran.scarce.seen.logits.items()}
    known = {tokens for tokens, _ in found}
    for number, request in enumerate(ran.case.requests):
        for choice in ran.scarce.answers[f"r{number}"].choices:
            for i, token in enumerate(choice.token_ids):
                before = (*request.prompt, *choice.token_ids[:i])
                if before in known and (before, token) not in found:
                    return True
    return False


def _distinct(ran: Ran) -> bool:
    return all(len(set(c.token_ids)) == len(c.token_ids) for c in ran.choices) and (
        _not_the_likeliest(ran)
    )


def _only(allowed: list[int]):
    return lambda ran: all(token in allowed for c in ran.choices for token in c.token_ids)


def _structured(ran: Ran) -> bool:
    full = [c for c in ran.choices if c.finish_reason != "abort"]
    early = {c.text for c in full if c.stop_reason is not None}  # at a stop token or text
    whole = re.compile(PATTERN)
    return any(c.text for c in full) and all(
        whole.fullmatch(c.text) or (c.text in early and re.fullmatch(BEGUN, c.text)) for c in full
    )


def _scored(ran: Ran) -> bool:
    return any(answer.prompt_logprobs for answer in ran.scarce.answers.values())


def _sampling(name: str, option: str, acted, **params: object) -> Feature:
    return Feature(
        name=name, group="sampling", option=option, draw=setting(params=params), acted=acted
    )


FEATURES = (
    Feature(
        name="n=2",
        group="several outputs",
        option="`n=2`",
        draw=setting(params={"n": 2}),
        acted=_several,
        alone_in="outputs",
    ),
    Feature(
        name="best_of",
        group="several outputs",
        option="`n=2, best_of=3, temperature=1`",
        draw=setting(params={"n": 2, "best_of": 3, "temperature": 1.0}),
        acted=lambda ran: _several(ran) and _ranked(ran),
        alone_in="outputs",
    ),
    Feature(
        name="beam search",
        group="several outputs",
        option="`use_beam_search, beam_width=3, n=2`",
        draw=setting(
            params={"use_beam_search": True, "beam_width": 3, "n": 2, "temperature": None}
        ),
        acted=lambda ran: _several(ran) and _ranked(ran),
        alone_in="outputs",
    ),
    _sampling(
        "temperature",
        "`temperature=1, top_p=0.9, seed`",
        _not_the_likeliest,
        temperature=1.0,
        top_p=0.9,
    ),
    _sampling(
        "penalties",
        "`presence_penalty=2, frequency_penalty=2, repetition_penalty=2`",
        _distinct,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
    ),
    _sampling(
        "logit_bias",
        "`logit_bias`",
        lambda ran: any(FORCED in c.token_ids for c in ran.choices),
        logit_bias={FORCED: 3.0},
    ),
    _sampling(
        "allowed_token_ids", "`allowed_token_ids`", _only(ALLOWED), allowed_token_ids=ALLOWED
    ),
    _sampling(
        "stop_token_ids",
        "`stop_token_ids`",
        lambda ran: any(c.finish_reason == "stop" for c in ran.choices),
        stop_token_ids=list(range(2, 128, 6)),
        max_tokens=16,
    ),
    Feature(
        name="stop texts",
        group="sampling",
        option="`stop`",
        draw=setting(params={"stop": [*STOPS], "max_tokens": 16}, tokenizer=True),
        acted=lambda ran: any(isinstance(c.stop_reason, str) for c in ran.choices),
    ),
    Feature(
        name="structured output",
        group="sampling",
        option=f"`structured_outputs={{'regex': '{PATTERN}'}}`",
        draw=setting(params={"structured_outputs": {"regex": PATTERN}}, tokenizer=True),
        acted=_structured,
    ),
    _sampling(
        "logprobs",
        "`logprobs=2`",
        lambda ran: all(c.logprobs for c in ran.choices if c.finish_reason != "abort"),
        logprobs=2,
    ),
    Feature(
        name="prompt_logprobs",
        group="sampling",
        option="`prompt_logprobs=1`",
        draw=setting(first_params={"prompt_logprobs": 1}),
        acted=_scored,
    ),
)
