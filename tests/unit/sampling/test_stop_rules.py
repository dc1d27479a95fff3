"""Stop conditions of an output: when it ends, the reason and the text."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import quire
from quire.config.sampling_params import SamplingParams
from quire.sampling.detokenizer import Ending, OutputText, ending_token

TINY = PreTrainedTokenizerFast.from_pretrained(Path(quire.__path__[0]) / "assets" / "quire-tiny")
EOS = (1, 2)


def tokens(text):
    return TINY(text)["input_ids"]


def follow(params, token_ids, tokenizer=TINY):
    output = OutputText(params, EOS, tokenizer, tokens("A prompt."))
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        text += output.push(token_id)
        if output.ending is not None:
            return text, output.ending, count
    return text, None, len(token_ids)


@pytest.mark.parametrize(
    ("options", "token_id", "num_output", "ending"),
    [
        ({}, 9, 3, None),
        ({}, 2, 3, Ending("stop")),
        ({"ignore_eos": True}, 2, 3, None),
        ({"stop_token_ids": (9,)}, 9, 3, Ending("stop", 9)),
        ({"stop_token_ids": (2,)}, 2, 3, Ending("stop")),
        ({"stop_token_ids": (2,), "ignore_eos": True}, 2, 3, Ending("stop", 2)),
        ({"min_tokens": 3, "stop_token_ids": (9,)}, 9, 3, None),
        ({"min_tokens": 3, "stop_token_ids": (9,)}, 9, 4, Ending("stop", 9)),
        ({"min_tokens": 3}, 1, 3, None),
        ({}, 9, 16, Ending("length")),
        ({}, 1, 16, Ending("stop")),
        ({"min_tokens": 16}, 9, 16, Ending("length")),
    ],
)
def test_token_ids_and_length_end_an_output(options, token_id, num_output, ending):
    assert ending_token(SamplingParams(**options), EOS, token_id, num_output) == ending


def test_stop_string_across_tokens_is_cut_from_the_output():
    text, ending, _ = follow(
        SamplingParams(max_tokens=99, stop="STOP now"), tokens("one two STOP now three")
    )

    assert (text, ending) == ("one two ", Ending("stop", "STOP now"))


def test_stop_string_is_included_on_request():
    params = SamplingParams(max_tokens=99, stop="STOP", include_stop_str_in_output=True)

    assert follow(params, tokens("one STOP two"))[0] == "one STOP"


def test_partial_stop_string_is_not_emitted():
    output = OutputText(SamplingParams(max_tokens=99, stop="\n\nQ:"), EOS, TINY, ())
    shown = ""

    for token_id in tokens("yes\n\nQ"):
        shown += output.push(token_id)

    assert shown == "yes"
    assert shown + output.abort() == "yes\n\nQ"


def test_held_back_text_is_emitted_at_max_tokens():
    token_ids = tokens("yes ST")
    params = SamplingParams(max_tokens=len(token_ids), stop="STOP")

    assert follow(params, token_ids) == ("yes ST", Ending("length"), len(token_ids))


def test_stop_string_takes_precedence_over_length():
    token_ids = tokens("yes STOP")
    params = SamplingParams(max_tokens=len(token_ids), stop="STOP")

    assert follow(params, token_ids)[:2] == ("yes ", Ending("stop", "STOP"))


def test_stop_string_within_min_tokens_is_ignored():
    token_ids = tokens("a STOP b STOP c")
    params = SamplingParams(max_tokens=99, min_tokens=len(tokens("a STOP b")), stop="STOP")

    assert follow(params, token_ids)[:2] == ("a STOP b ", Ending("stop", "STOP"))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [("##",), ("b##cd", "##"), ("#",), ("##cd##", "cd#"), ("x",)])
def test_stop_text_that_ends_after_min_tokens_ends_the_output(stop, include):
    text = "ab##cd##"
    token_ids = [token for character in text for token in tokens(character)]
    assert len(token_ids) == len(text)
    for min_tokens in range(len(text) + 1):
        params = SamplingParams(
            max_tokens=len(text),
            min_tokens=min_tokens,
            stop=stop,
            include_stop_str_in_output=include,
        )
        ends = [
            (end, start)
            for start in range(len(text))
            for word in stop
            if text.startswith(word, start) and (end := start + len(word)) > min_tokens
        ]
        end, start = min(ends, default=(len(text), len(text)))

        shown, ending, _ = follow(params, token_ids)

        assert shown == text[: end if include else start], min_tokens
        assert ending == (Ending("stop", text[start:end]) if ends else Ending("length"))


@pytest.mark.parametrize(("include", "shown"), [(False, "one"), (True, "one!")])
def test_stop_token_text_is_included_on_request_only(include, shown):
    (mark,) = tokens("!")
    params = SamplingParams(stop_token_ids=(mark,), include_stop_str_in_output=include)

    text, ending, _ = follow(params, [*tokens("one"), mark])

    assert (text, ending) == (shown, Ending("stop", mark))


def test_eos_token_has_no_text_even_without_skipping_special_tokens():
    params = SamplingParams(skip_special_tokens=False)

    assert follow(params, [*tokens("one"), 1])[0] == "one"


def test_incomplete_character_at_max_tokens_is_a_replacement_character():
    token_ids = tokens("a€")
    params = SamplingParams(max_tokens=len(token_ids) - 1)

    assert follow(params, token_ids)[0] == "a\N{REPLACEMENT CHARACTER}"


def test_without_a_tokenizer_ids_and_length_end_an_output():
    params = SamplingParams(max_tokens=3, stop="never")

    assert follow(params, [7, 7, 7, 7], tokenizer=None) == ("", Ending("length"), 3)
    assert follow(params, [7, 1], tokenizer=None) == ("", Ending("stop"), 2)
