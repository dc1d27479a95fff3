"""Texts and bytes of single tokens, for all kinds of tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quire.sampling.detokenizer import Detokenizer
from quire.serve.logprobs import TextOffsets, TokenPieces


@pytest.fixture(scope="module")
def sentence_pieces():
    """A tokenizer like SentencePiece: tokens include leading spaces, with byte fallback."""
    names = ["<unk>", "▁Hello", "▁world", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found.add_special_tokens({"bos_token": "<s>"})  # its id is 8
    return found


def test_token_text_includes_its_leading_space(sentence_pieces):
    pieces = TokenPieces(sentence_pieces)

    assert sentence_pieces.decode([2]) == "world"
    assert [pieces.text(token) for token in (1, 2, 3)] == [" Hello", " world", "s"]
    assert pieces.raw(2) == b" world"


def test_byte_tokens_have_exact_bytes(sentence_pieces):
    pieces = TokenPieces(sentence_pieces)

    assert b"".join(pieces.raw(token) for token in (4, 5, 6, 7)).decode() == "😀"


def test_byte_level_tokens_have_exact_bytes(llm):
    pieces = TokenPieces(llm.model.tokenizer)
    text = "naïve 你好 😀 \x00\n\t~"

    ids = llm.encode(text)

    assert b"".join(pieces.raw(token) for token in ids) == text.encode()
    singles = [token for token in range(2048) if len(pieces.raw(token)) == 1]
    assert len({pieces.raw(token) for token in singles}) == 256


def test_without_a_tokenizer_tokens_are_named_by_their_ids():
    pieces = TokenPieces(None)

    assert pieces.text(17) == "token_id:17"
    assert pieces.raw(17) == b"token_id:17"


# ---- positions of tokens -------------------------------------------------------------------------


def positions(pieces, token_ids, text, start=0):
    """Text and position of each token in a whole text."""
    return TextOffsets(pieces, start).push(token_ids, text, is_last=True)


@pytest.mark.parametrize(
    ("token_ids", "text", "expected"),
    [
        ([1, 2, 3], "Hello worlds", [("Hello", 0), (" world", 5), ("s", 11)]),
        ([8, 1, 2], "Hello world", [("<s>", 0), ("Hello", 0), (" world", 5)]),
        ([8, 1, 2], "<s> Hello world", [("<s>", 0), (" Hello", 3), (" world", 9)]),
        ([1, 4, 5, 6, 7, 3], "Hello😀s", [0, 5, 5, 5, 5, 6]),
        ([1, 4, 5], "Hello\N{REPLACEMENT CHARACTER}", [0, 5, 5]),
        ([1, 2], "Hello", [("Hello", 0), (" world", 5)]),  # a stop text cut the rest
        ([1, 2, 3], "Hello wo", [("Hello", 0), (" world", 5), ("s", 8)]),
        ([1, 2], "hello   World", [(" Hello", 0), (" world", 5)]),  # normalized
        ([], "", []),
    ],
)
def test_tokens_have_their_position_in_the_text(sentence_pieces, token_ids, text, expected):
    found = positions(TokenPieces(sentence_pieces), token_ids, text)

    if expected and isinstance(expected[0], int):
        found = [offset for _, offset in found]
    assert found == expected


def test_without_a_tokenizer_tokens_have_no_position_beyond_the_empty_text():
    assert positions(TokenPieces(None), [3, 4], "") == [("token_id:3", 0), ("token_id:4", 0)]


@given(text=st.text(max_size=30), cuts=st.sets(st.integers(0, 60), max_size=8))
def test_streamed_positions_equal_those_of_the_whole_text(llm, text, cuts):
    pieces, ids = TokenPieces(llm.model.tokenizer), llm.encode("x" + text)[1:]
    detokenizer = Detokenizer(llm.model.tokenizer, llm.encode("x"), skip_special_tokens=True)
    deltas = [detokenizer.push(token) for token in ids]
    last = detokenizer.finish()
    whole = positions(pieces, ids, "".join(deltas) + last)

    offsets, streamed, begin = TextOffsets(pieces), [], 0
    for end in sorted(cut for cut in cuts if cut < len(ids)):
        streamed += offsets.push(ids[begin:end], "".join(deltas[begin:end]), is_last=False)
        begin = end
    streamed += offsets.push(ids[begin:], "".join(deltas[begin:]) + last, is_last=True)

    assert streamed == whole
    shown = "".join(deltas) + last
    for piece, offset in whole:
        assert offset <= len(shown)
        if "\N{REPLACEMENT CHARACTER}" not in piece:
            assert shown[offset:].startswith(piece)
