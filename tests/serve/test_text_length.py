"""The lower bound of the number of tokens of a text."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.serve.text import text_length

BYTES = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def make_tokenizer(normalizer=None, model=None, vocab=BYTES, added=()):
    tokenizer = Tokenizer(model or models.BPE(vocab, []))
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def characters_per_token(tokenizer):
    length = text_length(tokenizer)
    return None if length is None else length.characters_per_token


def test_bound_is_the_longest_vocabulary_entry(llm):
    assert characters_per_token(llm.model.tokenizer) == len("Ġunderstand")
    assert characters_per_token(make_tokenizer()) == 1


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
def test_shortening_normalizer_widens_or_removes_the_bound(normalizer, expected):
    assert characters_per_token(make_tokenizer(normalizer)) == expected


@pytest.mark.parametrize("sides", [{"lstrip": True}, {"rstrip": True}, {}])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace(" ", "_")])
def test_spaces_stripped_by_an_added_token_are_not_counted(sides, special, normalizer):
    token = AddedToken("<mask>", special=special, normalized=False, **sides)
    tokenizer = make_tokenizer(normalizer, added=[token])
    length = text_length(tokenizer)
    spaces = " \n\t\u00a0\u3000\u2029" * 500

    for text in (spaces, f"<mask>{spaces}", f"{spaces}<mask>", f"a{spaces}<mask>{spaces}b" * 3):
        num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert length.min_tokens(text) <= num_tokens
    assert length.min_tokens("x" * 6000) >= 6000 // (4 * len("<mask>"))
    assert length.min_tokens(spaces) >= len(spaces) // (4 * len("<mask>"))
    assert length.stripping == (("<mask>",) if sides else ())


def test_no_bound_for_a_stripping_token_in_normalized_text():
    token = AddedToken("<mask>", lstrip=True, normalized=True)

    assert text_length(make_tokenizer(normalizers.NFKC(), added=[token])) is None
    assert text_length(make_tokenizer(added=[token])).stripping == ("<mask>",)


def test_no_bound_for_merged_unknown_characters():
    words = models.WordLevel({"<unk>": 0, "Hi": 1}, unk_token="<unk>")

    assert characters_per_token(make_tokenizer(model=words)) is None
