"""Encoding of prompts with the packaged tokenizer."""

import string
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.models.source import find_model
from quire.models.tokenizer import encode_prompt, load_tokenizer, undecodable_ids

DOC = 2  # <|doc|>


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(find_model("quire-tiny")[0])
    assert found is not None
    return found


def test_prompt_is_encoded_without_extra_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    token_ids = encode_prompt(tokenizer, "The key is 42.")

    assert DOC not in token_ids
    assert tokenizer.decode(token_ids) == "The key is 42."
    assert encode_prompt(tokenizer, "<|doc|>The key is 42.") == [DOC, *token_ids]


def test_prompt_longer_than_the_context_is_encoded(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert len(encode_prompt(tokenizer, "7" * 5000)) == 5000


def test_an_empty_prompt_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="at least one token"):
        encode_prompt(tokenizer, "")


def test_missing_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


SENTENCES = "The gull cries above the harbour wall, and 17 boats sail over the quiet water.\n"
TEXTS = {
    "sentences": SENTENCES * 900,
    "one character": "a" * 67_001,
    "period of seven": "abcabca" * 10_000,
    "odd number of pairs": "ab" * 33_501,
    "odd number of pairs before a word": "ab" * 33_501 + "the",
    "spaces": " " * 250_000 + "end" + " \n" * 2000,
    "no spaces": "".join(chr(97 + i * i % 26) for i in range(70_000)),
    "other scripts": "日本語のテキスト、😀 naïve e\u0301 " * 2500,
    "special tokens": ("<|doc|>a text " * 5_000),
}


def sentence_piece() -> PreTrainedTokenizerBase:
    """A tokenizer without pre-tokenization, which begins and ends each text with a token."""
    words = ["▁the", "▁boat", "aa", "aaaa", "ab", "abab", "abc", "▁▁", "▁▁▁▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for symbol in [*dict.fromkeys("▁" + string.printable), *words]:
        vocab.setdefault(symbol, len(vocab))
    merges = [
        ("a", "a"),
        ("aa", "aa"),
        ("a", "b"),
        ("ab", "c"),
        ("ab", "ab"),
        ("▁", "▁"),
        ("▁▁", "▁▁"),
    ]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("keep", [1, 300])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_last_tokens_of_a_text_are_those_of_the_whole_text(kind, name, keep, tokenizer) -> None:
    tokenizer = tokenizer if kind == "byte level" else sentence_piece()
    whole = encode_prompt(tokenizer, TEXTS[name])

    assert encode_prompt(tokenizer, TEXTS[name], keep=keep) == whole[-keep:]
    assert encode_prompt(tokenizer, "a b", keep=keep) == encode_prompt(tokenizer, "a b")[-keep:]


@pytest.mark.parametrize(
    ("text", "longest_token", "max_characters"),
    [
        (SENTENCES * 10_000, 11, 60_000),
        (SENTENCES * 900, 256, 2 * len(SENTENCES) * 900),
        (" " * 200_000, 256, 2 * 200_000),
    ],
)
def test_last_tokens_of_a_long_text_are_found_from_few_characters(
    tokenizer, text, longest_token, max_characters
) -> None:
    lengths: list[int] = []

    class Counted(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: object) -> object:
            lengths.append(len(text))
            return super().__call__(text, **options)

        def get_vocab(self) -> dict[str, int]:
            return super().get_vocab() | {"a" * longest_token: 0}

    tokenizer.__class__ = Counted
    encode_prompt(tokenizer, text, keep=10)

    assert 0 < sum(lengths) <= max_characters


def test_ids_without_a_token_are_undecodable() -> None:
    vocab = {"a": 0, "b": 1, "c": 4}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="a")
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    added = tokenizer.convert_tokens_to_ids("</s>")

    assert added == 3  # the number of tokens before
    assert undecodable_ids(tokenizer, 8) == [2, 5, 6, 7]
    assert undecodable_ids(tokenizer, 3) == [2]
    assert undecodable_ids(None, 8) == []


def test_all_ids_of_the_packaged_model_are_decodable(tokenizer: PreTrainedTokenizerBase) -> None:
    assert undecodable_ids(tokenizer, len(tokenizer)) == []


def test_tokens_with_equal_texts_are_decodable() -> None:
    tokens = [("<unk>", 0.0), ("a", -1.0), ("a", -2.0), ("b", -1.0)]
    plain = Tokenizer(models.Unigram(tokens, unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")

    assert len(set(tokenizer.get_vocab().values())) == 3
    assert undecodable_ids(tokenizer, 6) == [4, 5]
