"""Texts and bytes of single tokens, for all kinds of tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quire.sampling.detokenizer import REPLACEMENT
from quire.sampling.outputs import OutputDelta
from quire.sampling.sampler import SampledToken
from quire.serve.logprobs import TokenPieces
from quire.serve.responses import CompletionWriter


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


def positions(pieces, token_ids, text):
    """Text and position of each token of a prompt."""
    return pieces.placed(token_ids, pieces.prompt_offsets(token_ids, text), text)


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
        ([4, 1, 2], "\N{REPLACEMENT CHARACTER} Hello world", [0, 1, 7]),
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


@given(ids=st.lists(st.integers(0, 2047), max_size=30))
def test_positions_in_decoded_prompts_are_those_of_the_tokens(llm, ids):
    pieces, text = TokenPieces(llm.model.tokenizer), llm.model.tokenizer.decode(ids)

    for piece, offset in positions(pieces, ids, text):
        assert offset <= len(text)
        if REPLACEMENT not in piece:
            assert text[offset:].startswith(piece)


@pytest.mark.parametrize(
    ("texts", "chunks"),
    [
        # "#" may begin a stop text: its token is sent with its text, or at the end
        ([("a", 0, "a"), ("#", 1, ""), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
        ([("a", 0, "a"), ("#", 1, ""), ("#", 2, "")], [[("a", 0)], [("#", 1), ("#", 1)]]),
        ([("a", 0, ""), ("#", 1, "a"), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
    ],
)
def test_streamed_tokens_have_positions_within_the_sent_text(llm, texts, chunks):
    ids = [llm.encode(token)[0] for token, _, _ in texts]
    writer = CompletionWriter(index=0, pieces=TokenPieces(llm.model.tokenizer), wants_logprobs=True)
    deltas = [
        OutputDelta(
            request_id="r",
            text=text,
            logprobs=(SampledToken(i, -1.0, (), 1, text_offset=offset),),
            finish_reason="stop" if number == len(ids) - 1 else None,
        )
        for number, (i, (_, offset, text)) in enumerate(zip(ids, texts, strict=True))
    ]

    sent = [choice["logprobs"] for delta in deltas for choice in writer.chunks(delta)]

    assert [list(zip(one["tokens"], one["text_offset"], strict=True)) for one in sent] == chunks
