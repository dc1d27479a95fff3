"""Incremental detokenization: exact text, without incomplete characters."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quire
from quire.sampling.detokenizer import MAX_HELD_TOKENS, REPLACEMENT, Detokenizer, StopChecker

TINY = PreTrainedTokenizerFast.from_pretrained(Path(quire.__path__[0]) / "assets" / "quire-tiny")


def sentencepiece_style():
    """Byte fallback and a space before every word, as in Llama 2's tokenizer."""
    bytes_ = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    words = ["▁", "▁Hello", "▁world", "lo", "é", ".", "▁the", "a", "b"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytes_
    vocab |= {word: len(vocab) + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


SPACED = sentencepiece_style()


def encode(text):
    """Token ids of a text, in which the text of a special token is plain text."""
    return TINY(text, split_special_tokens=True)["input_ids"]


def decode(tokenizer, token_ids, skip_special_tokens=True):
    return tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def shared_length(first, second):
    return max(n for n in range(len(first) + 1) if second.startswith(first[:n]))


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
    token_ids = encode(text)

    assert "".join(pieces(TINY, token_ids)) == text


@given(text=st.text(st.characters(codec="utf-8"), max_size=30), cut=st.integers(0, 60))
@example("a😀b", 2)
@example("<s>", 0)
@example("a\N{REPLACEMENT CHARACTER}b", 4)
@settings(max_examples=100, deadline=None)
def test_output_text_is_the_text_after_the_prompt(text, cut):
    token_ids = encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]

    emitted = "".join(pieces(TINY, output, prompt))

    assert emitted == text[shared_length(decode(TINY, prompt), text) :]


@given(token_ids=st.lists(st.integers(0, len(TINY) - 1), max_size=200), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_tokens_decode_like_the_whole_sequence(token_ids, skip):
    assert "".join(pieces(TINY, token_ids, (), skip)) == decode(TINY, token_ids, skip)


def test_many_invalid_bytes_decode_like_the_whole_sequence():
    lead, tail = TINY("€")["input_ids"][:1], TINY("€")["input_ids"][1:]

    for token_ids in (lead * 300, tail * 300, (lead + tail) * 200 + lead, tail[:1] * 70 + lead):
        assert "".join(pieces(TINY, token_ids)) == decode(TINY, token_ids)


@pytest.mark.parametrize("num_broken", range(MAX_HELD_TOKENS - 6, MAX_HELD_TOKENS + 2))
def test_character_after_many_invalid_bytes_is_decoded(num_broken):
    euro = TINY("€")["input_ids"]
    token_ids = euro[1:2] * num_broken + euro + TINY(" end")["input_ids"]

    assert "".join(pieces(TINY, token_ids)) == "\N{REPLACEMENT CHARACTER}" * num_broken + "€ end"


def test_only_the_last_piece_can_have_an_incomplete_character():
    token_ids = TINY("naïve 日本 😀 text")["input_ids"]

    for end in range(len(token_ids)):
        *pushed, _ = pieces(TINY, token_ids[:end])

        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pushed)


def test_incomplete_character_at_the_end_is_a_replacement_character_once():
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

    whole = decode(SPACED, token_ids)
    prompt = decode(SPACED, token_ids[:split_from])

    assert "".join(pieces(SPACED, token_ids)) == whole
    assert "".join(pieces(SPACED, token_ids[cut:], token_ids[:cut])) == (
        whole[len(prompt) :] if cut < len(token_ids) else ""
    )


def test_first_word_after_a_prompt_keeps_its_space():
    hello, world = SPACED.convert_tokens_to_ids(["▁Hello", "▁world"])

    assert pieces(SPACED, [world], [hello]) == [" world", ""]
    assert pieces(SPACED, [world], [1]) == ["world", ""]


def test_special_tokens_are_emitted_on_request_only():
    token_ids = [0, *TINY("hi")["input_ids"], 1]

    assert "".join(pieces(TINY, token_ids)) == "hi"
    assert "".join(pieces(TINY, token_ids, (), False)) == "<s>hi</s>"


@pytest.mark.parametrize("text", ["</s>", "word ", "é😀", "\N{REPLACEMENT CHARACTER}"])
def test_window_is_bounded_for_long_outputs(text):
    token_ids = (TINY(text)["input_ids"] * 4000)[:4000]
    detokenizer = Detokenizer(TINY, [], skip_special_tokens=True)
    longest = 0

    for token_id in token_ids:
        detokenizer.push(token_id)
        longest = max(longest, len(detokenizer._window))

    assert longest <= 2 * MAX_HELD_TOKENS
    assert (detokenizer.num_characters == 0) == (text == "</s>")


@given(
    ids=st.lists(st.integers(0, 2047), max_size=40),
    split=st.booleans(),
    skip_special_tokens=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_offset_of_a_token_is_the_position_of_its_text(ids, split, skip_special_tokens):
    prompt = encode("€")[:-1] if split else encode("a")
    detokenizer = Detokenizer(TINY, prompt, skip_special_tokens=skip_special_tokens)
    text, offsets = "", []
    for token_id in ids:
        text += detokenizer.push(token_id)
        offsets.append(detokenizer.offset)
    text += detokenizer.finish()

    assert detokenizer.num_characters == len(text)
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        piece = decode(TINY, [token_id], skip_special_tokens)
        assert offset <= len(text)
        if REPLACEMENT not in piece:
            assert text[offset:].startswith(piece)


def test_tokens_of_a_character_have_its_offset():
    detokenizer = Detokenizer(TINY, (), skip_special_tokens=True)

    found = []
    for token_id in encode("a€b"):
        detokenizer.push(token_id)
        found.append(detokenizer.offset)

    assert found == [0, *[1] * (len(found) - 2), 2]


def test_without_a_tokenizer_the_text_is_empty():
    assert pieces(None, [1, 2, 3], [4]) == ["", "", "", ""]


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
    checker = StopChecker(stops, include=False)
    whole = "".join(pieces)
    shown = ""

    for piece in pieces:
        text, found = checker.push(piece)
        shown += text
        if found is not None:
            return

    held_text = whole[len(shown) :]
    prefixes = {stop[:end] for stop in stops for end in range(1, len(stop))}
    assert held_text == max((b for b in prefixes if whole.endswith(b)), key=len, default="")


def test_without_stop_strings_text_is_emitted_at_once():
    checker = StopChecker([], include=False)

    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""


def test_stop_string_that_ends_first_is_used():
    assert StopChecker(["abcd", "bc"], include=False).push("xabcd") == ("xa", "bc")
    assert StopChecker(["c", "abc"], include=True).push("xabcd") == ("xabc", "abc")
