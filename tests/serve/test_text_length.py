"""How few tokens a text can have, by its length."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.serve.text_length import characters_per_token

BYTES = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def tokenizer(normalizer=None, model=None, vocab=BYTES):
    made = Tokenizer(model or models.BPE(vocab, []))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_token_stands_for_the_longest_entry_at_most(llm):
    assert characters_per_token(llm.model.tokenizer) == len("Ġunderstand")
    assert characters_per_token(tokenizer()) == 1


def test_the_bound_holds_for_every_text(llm):
    width = characters_per_token(llm.model.tokenizer)

    for text in ("understand " * 100, "particular" * 50, "\n" * 999, "x" * 999, "é你😀" * 333):
        assert len(llm.encode(text)) * width >= len(text)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")]), 4),
        (normalizers.Replace(" ", "_"), 1),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]), None),
    ],
)
def test_a_normalizer_that_shortens_widens_the_bound_or_leaves_none(normalizer, expected):
    assert characters_per_token(tokenizer(normalizer)) == expected


def test_there_is_no_bound_where_unknown_characters_are_merged():
    words = models.WordLevel({"<unk>": 0, "Hi": 1}, unk_token="<unk>")

    assert characters_per_token(tokenizer(model=words)) is None
