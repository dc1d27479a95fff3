from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quire
from quire.config.sampling_params import SamplingParams
from quire.sampling.detokenizer import (
    MAX_HELD_TOKENS,
    REPLACEMENT,
    Detokenizer,
    Ending,
    OutputText,
    StopChecker,
    ending_token,
)

TINY = PreTrainedTokenizerFast.from_pretrained(Path(quire.__path__[0]) / "assets" / "quire-tiny")


def sentencepiece_style():
    """Byte fallback and a space before every word, as in Llama 2's tokenizer."""
    words = ["▁", "▁Hello", "▁world", "lo", "é", ".", "▁the", "a", "b"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


SPACED = sentencepiece_style()


def encode(text):
    """Token ids of a text, in which the text of a special token is plain text."""
    return TINY(text, split_special_tokens=True)["input_ids"]


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def pieces(tokenizer, token_ids, prompt=(), skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    pushed = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pushed, detokenizer.finish()]


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
@example("\N{REPLACEMENT CHARACTER}" * 100 + "é" * 100)
@example("a\N{REPLACEMENT CHARACTER}")
@example("a<s>b")
@example("👩‍👩‍👧‍👦 e\u0301 日本\n\n  don't")
@settings(max_examples=200, deadline=None)
def test_incremental_text_equals_the_whole_text(text):
    assert "".join(pieces(TINY, encode(text))) == text


@given(text=st.text(st.characters(codec="utf-8"), max_size=30), cut=st.integers(0, 60))
@example("a😀b", 2)
@example("<s>", 0)
@example("a\N{REPLACEMENT CHARACTER}b", 4)
@settings(max_examples=100, deadline=None)
def test_output_text_is_the_text_after_the_prompt(text, cut):
    token_ids = encode(text)
    begin = decode(TINY, token_ids[:cut])
    shared = max(n for n in range(len(begin) + 1) if text.startswith(begin[:n]))
    assert "".join(pieces(TINY, token_ids[cut:], token_ids[:cut])) == text[shared:]


@given(token_ids=st.lists(st.integers(0, len(TINY) - 1), max_size=200), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_tokens_decode_like_the_whole_sequence(token_ids, skip):
    assert "".join(pieces(TINY, token_ids, (), skip)) == decode(TINY, token_ids, skip)


def test_invalid_and_incomplete_characters_decode_like_the_whole_sequence():
    lead, *tail = ([token_id] for token_id in TINY("€")["input_ids"])
    tails = [token_id for one in tail for token_id in one]
    for ids in (lead * 300, tails * 300, (lead + tails) * 200 + lead, tail[0] * 70 + lead):
        assert "".join(pieces(TINY, ids)) == decode(TINY, ids)
    euro, end = TINY("€")["input_ids"], TINY(" end")["input_ids"]
    for num_broken in range(MAX_HELD_TOKENS - 6, MAX_HELD_TOKENS + 2):
        text = "".join(pieces(TINY, euro[1:2] * num_broken + euro + end))
        assert text == "\N{REPLACEMENT CHARACTER}" * num_broken + "€ end"

    token_ids = TINY("naïve 日本 😀 text")["input_ids"]
    for end in range(len(token_ids)):
        *pushed, _ = pieces(TINY, token_ids[:end])
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pushed)

    detokenizer = Detokenizer(TINY, [], skip_special_tokens=True)
    for token_id in TINY("a€")["input_ids"][:-1]:
        detokenizer.push(token_id)
    assert [detokenizer.finish(), detokenizer.finish()] == ["\N{REPLACEMENT CHARACTER}", ""]


WORDS = ["▁Hello", "▁world", "▁", "lo", "é", ".", "▁the"]
SPELLED = [[token_id] for token_id in SPACED.convert_tokens_to_ids(WORDS)] + [
    [byte + 3 for byte in character.encode()] for character in ("a", "é", "日", "😀")
]


@given(units=st.lists(st.sampled_from(SPELLED), max_size=20), cut=st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_text_equals_the_whole_text_after_any_prompt(units, cut):
    token_ids = [token_id for unit in units for token_id in unit]
    ends = [sum(map(len, units[:count])) for count in range(len(units) + 1)]
    split_from = max(end for end in ends if end <= cut)
    whole, prompt = (decode(SPACED, ids) for ids in (token_ids, token_ids[:split_from]))
    rest = whole[len(prompt) :] if cut < len(token_ids) else ""
    assert "".join(pieces(SPACED, token_ids)) == whole
    assert "".join(pieces(SPACED, token_ids[cut:], token_ids[:cut])) == rest


def test_first_words_keep_their_space_and_special_tokens_need_a_request():
    hello, world = SPACED.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert pieces(SPACED, [world], [hello]) == [" world", ""]
    assert pieces(SPACED, [world], [1]) == ["world", ""]
    token_ids = [0, *TINY("hi")["input_ids"], 1]
    assert "".join(pieces(TINY, token_ids)) == "hi"
    assert "".join(pieces(TINY, token_ids, (), False)) == "<s>hi</s>"
    assert pieces(None, [1, 2, 3], [4]) == ["", "", "", ""]


@pytest.mark.parametrize("text", ["</s>", "word ", "é😀", "\N{REPLACEMENT CHARACTER}"])
def test_window_is_bounded_for_long_outputs(text):
    detokenizer = Detokenizer(TINY, [], skip_special_tokens=True)
    for token_id in (TINY(text)["input_ids"] * 4000)[:4000]:
        detokenizer.push(token_id)
        assert len(detokenizer._window) <= 2 * MAX_HELD_TOKENS
    assert (detokenizer.num_characters == 0) == (text == "</s>")


def offsets_of(ids, prompt=(), skip_special_tokens=True):
    detokenizer = Detokenizer(TINY, prompt, skip_special_tokens=skip_special_tokens)
    text, offsets = "", []
    for token_id in ids:
        text += detokenizer.push(token_id)
        offsets.append(detokenizer.offset)
    text += detokenizer.finish()
    assert detokenizer.num_characters == len(text)
    return text, offsets


@given(
    ids=st.lists(st.integers(0, 2047), max_size=40),
    split=st.booleans(),
    skip_special_tokens=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_offset_of_a_token_is_the_position_of_its_text(ids, split, skip_special_tokens):
    prompt = encode("€")[:-1] if split else encode("a")
    text, offsets = offsets_of(ids, prompt, skip_special_tokens)

    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        piece = decode(TINY, [token_id], skip_special_tokens)
        assert offset <= len(text)
        assert REPLACEMENT in piece or text[offset:].startswith(piece)
    _, offsets = offsets_of(encode("a€b"))
    assert offsets == [0, *[1] * (len(offsets) - 2), 2]  # tokens of a character have its offset


def naive_stop(text, stops, after=0):
    """The shortest prefix, longer than `after`, that ends in a stop string; the longest stop."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("ab\nc", max_size=6), max_size=12)


@given(stops=STOPS, pieces=PIECES, include=st.booleans(), min_pieces=st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_stop_strings_are_found_independent_of_the_pieces(stops, pieces, include, min_pieces):
    checker = StopChecker(stops, include=include)
    shown, found = "", None

    for number, piece in enumerate(pieces):
        text, found = checker.push(piece, searched=number >= min_pieces)
        shown += text
        if found is not None:
            break
    shown += checker.flush()

    after = len("".join(pieces[:min_pieces]))
    expected, stop = naive_stop("".join(pieces), stops, after)
    assert found == stop
    assert shown == expected + (stop or "" if include else "")


@given(stops=STOPS, pieces=PIECES)
@settings(max_examples=200, deadline=None)
def test_only_a_possible_stop_prefix_is_held_back(stops, pieces):
    checker, whole, shown = StopChecker(stops, include=False), "".join(pieces), ""
    for piece in pieces:
        text, found = checker.push(piece)
        shown += text
        if found is not None:
            return
    prefixes = {stop[:end] for stop in stops for end in range(1, len(stop))}
    longest = max((b for b in prefixes if whole.endswith(b)), key=len, default="")
    assert whole[len(shown) :] == longest


def test_stop_string_that_ends_first_is_used_and_a_partial_one_not_emitted():
    assert StopChecker(["abcd", "bc"], include=False).push("xabcd") == ("xa", "bc")
    assert StopChecker(["c", "abc"], include=True).push("xabcd") == ("xabc", "abc")
    checker = StopChecker([], include=False)
    assert (checker.push("anything"), checker.flush()) == (("anything", None), "")
    output = OutputText(SamplingParams(max_tokens=99, stop="\n\nQ:"), EOS, TINY, ())
    shown = "".join(map(output.push, tokens("yes\n\nQ")))
    assert shown == "yes"
    assert shown + output.abort() == "yes\n\nQ"


# ---- where an output ends ------------------------------------------------------------------------

EOS = (1, 2)


def tokens(text):
    return TINY(text)["input_ids"]


def follow(token_ids, tokenizer=TINY, **options):
    output, text = OutputText(SamplingParams(**options), EOS, tokenizer, tokens("A prompt.")), ""
    for count, token_id in enumerate(token_ids, start=1):
        text += output.push(token_id)
        if output.ending is not None:
            return text, output.ending, count
    return text, None, len(token_ids)


ENDINGS = [  # options, last token, tokens of the output, its ending
    *(({}, 9, 3, None), ({}, 2, 3, Ending("stop")), ({"ignore_eos": True}, 2, 3, None)),
    ({"stop_token_ids": (9,)}, 9, 3, Ending("stop", 9)),
    ({"stop_token_ids": (2,)}, 2, 3, Ending("stop")),
    ({"stop_token_ids": (2,), "ignore_eos": True}, 2, 3, Ending("stop", 2)),
    ({"min_tokens": 3, "stop_token_ids": (9,)}, 9, 3, None),
    ({"min_tokens": 3, "stop_token_ids": (9,)}, 9, 4, Ending("stop", 9)),
    *(({"min_tokens": 3}, 1, 3, None), ({}, 9, 16, Ending("length")), ({}, 1, 16, Ending("stop"))),
    ({"min_tokens": 16}, 9, 16, Ending("length")),
]


def test_token_ids_and_length_end_an_output_with_its_text():
    for options, token_id, num_output, ending in ENDINGS:
        found = ending_token(SamplingParams(**options), EOS, token_id, num_output)
        assert found == ending, (options, token_id)
    for token_ids, found in (([7] * 4, (Ending("length"), 3)), ([7, 1], (Ending("stop"), 2))):
        assert follow(token_ids, None, max_tokens=3, stop="never") == ("", *found)
    for name, (options, token_ids, text, ending) in FOLLOWED.items():
        assert follow(token_ids, **{"max_tokens": 99} | options)[:2] == (text, ending), name


STOP = Ending("stop", "STOP")
FOLLOWED = {  # options, tokens, the text that is shown and the ending
    "across tokens": (
        {"stop": "STOP now"},
        *(tokens("one two STOP now three"), "one two ", Ending("stop", "STOP now")),
    ),
    "included": (
        {"stop": "STOP", "include_stop_str_in_output": True},
        *(tokens("one STOP two"), "one STOP", STOP),
    ),
    "held back until max_tokens": (
        {"stop": "STOP", "max_tokens": len(tokens("yes ST"))},
        *(tokens("yes ST"), "yes ST", Ending("length")),
    ),
    "precedes the length": (
        {"stop": "STOP", "max_tokens": len(tokens("yes STOP"))},
        *(tokens("yes STOP"), "yes ", STOP),
    ),
    "ignored within min_tokens": (
        {"stop": "STOP", "min_tokens": len(tokens("a STOP b"))},
        *(tokens("a STOP b STOP c"), "a STOP b ", STOP),
    ),
    "a stop token": (
        {"stop_token_ids": tuple(tokens("!"))},
        *(tokens("one!"), "one", Ending("stop", *tokens("!"))),
    ),
    "a stop token that is included": (
        {"stop_token_ids": tuple(tokens("!")), "include_stop_str_in_output": True},
        *(tokens("one!"), "one!", Ending("stop", *tokens("!"))),
    ),
    "no text of an end token": (
        {"skip_special_tokens": False},
        *([*tokens("one"), 1], "one", Ending("stop")),
    ),
    "an incomplete character": (
        {"max_tokens": len(tokens("a€")) - 1},
        *(tokens("a€"), "a\N{REPLACEMENT CHARACTER}", Ending("length")),
    ),
}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [("##",), ("b##cd", "##"), ("#",), ("##cd##", "cd#"), ("x",)])
def test_stop_text_that_ends_after_min_tokens_ends_the_output(stop, include):
    text = "ab##cd##"
    token_ids = [token for character in text for token in tokens(character)]
    assert len(token_ids) == len(text)
    for min_tokens in range(len(text) + 1):
        options = {"max_tokens": len(text), "min_tokens": min_tokens, "stop": stop}
        ends = [
            (end, start)
            for start in range(len(text))
            for word in stop
            if text.startswith(word, start) and (end := start + len(word)) > min_tokens
        ]
        end, start = min(ends, default=(len(text), len(text)))

        shown, ending, _ = follow(token_ids, **options, include_stop_str_in_output=include)

        assert shown == text[: end if include else start], min_tokens
        assert ending == (Ending("stop", text[start:end]) if ends else Ending("length"))
