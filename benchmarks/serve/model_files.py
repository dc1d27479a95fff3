"""A model folder with random weights, and a tokenizer in which every token has a text."""

import tempfile
from pathlib import Path
from typing import Any

PACKAGED = "quire-tiny"


def model_folder(name: str, files: Path) -> str:
    """The folder of a shape, which is written unless it exists; quire-tiny is packaged.

    Args:
        name: quire-tiny, or a shape of `benchmarks.common.workload.SHAPES`.
        files: folder of the written models.
    """
    if name == PACKAGED:
        return PACKAGED
    import torch

    from benchmarks.common.models import random_weights
    from benchmarks.common.workload import SHAPES

    folder = files / f"llama-{name}"
    if not folder.exists():
        files.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=files) as made:
            shape = SHAPES[name]()
            model = random_weights(shape, dtype=torch.bfloat16)
            model.save_pretrained(f"{made}/model")
            _write_tokenizer(shape.vocab_size, f"{made}/model")
            (Path(made) / "model").rename(folder)
    return str(folder)


def _write_tokenizer(vocab_size: int, folder: str) -> None:
    """Write a tokenizer of words: token i is the word w<i>."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=tokenizer).save_pretrained(folder)
