"""Texts and bytes of single tokens, for all kinds of tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quire.serve.logprobs import TokenPieces


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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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
