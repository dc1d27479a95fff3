"""Byte-level BPE tokenizer with one token per digit."""

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.evals.tasks import BookFiller, Setting, Split, build, names
from quire.evals.tasks.words import vocabulary
from training.config import BEGIN, DOCUMENT, END

_CHARACTERS_PER_BOOK = 80_000
_SAMPLES_PER_TASK = 60
_SPLITS: tuple[Split, ...] = ("train", "eval")


def _task_samples(book: str) -> list[str]:
    """Prompts of every task family, about 1 % of the text, so that their words need few tokens."""
    rng = random.Random(0)
    filler = BookFiller(book)
    return [
        build(name, rng, Setting(tokens=200, filler=filler, split=split)).prompt()
        for name in names()
        for split in _SPLITS
        if name != "labels" or split == "eval"
        for _ in range(_SAMPLES_PER_TASK)
    ]


def _key_words() -> str:
    kinds = ("adjective", "noun")
    return " ".join(word for kind in kinds for split in _SPLITS for word in vocabulary(kind, split))


def train_tokenizer(path: Path, documents: tuple[str, ...], vocab_size: int) -> None:
    """Learn the merges from books and tasks, and write tokenizer.json to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sample = [document[:_CHARACTERS_PER_BOOK] for document in documents]
    sample += _task_samples(documents[0])
    sample += [_key_words()] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))
