"""A tokenizer of 128 tokens: each is one byte of ASCII, and ids are the bytes."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support import zoo

PRINTED = range(33, 127)  # bytes that GPT-2's alphabet writes as themselves


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer for the vocabulary of zoo models."""
    others = iter(range(256, 512))
    letters = [chr(b if b in PRINTED else next(others)) for b in range(zoo.VOCAB_SIZE)]
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)
