"""GGUF files: Transformers reads the config and the tokenizer, and decodes the weights."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quire.errors import ConfigError, ModelError
from quire.models.foreign import foreign_code
from quire.models.weights import check_loaded, silence

SUFFIX = ".gguf"
PACKAGES = ("gguf", "accelerate")


def find_file(path: str | Path) -> Path | None:
    """The GGUF file at a path; None if the path names no GGUF file.

    Raises:
        ModelError: there is no such file.
    """
    if not str(path).endswith(SUFFIX):
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelError(f"expected a GGUF file, got {str(path)!r}: there is no such file")
    return file


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """Read the config of a GGUF file.

    Raises:
        ConfigError: a package that Transformers needs is missing.
        ModelError: the file cannot be read.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"GGUF files are read by Transformers with the packages {' and '.join(PACKAGES)}; "
            f"install {' and '.join(missing)}: pip install 'quire[gguf]'"
        )
    with foreign_code(f"{folder / name} cannot be read"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, gguf_file=name, local_files_only=True
        )
        return config


def load_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file.

    Raises:
        ModelError: the file has no tokenizer that Transformers can convert.
    """
    with foreign_code(f"the tokenizer in {folder / name} cannot be read"), silence():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, gguf_file=name, local_files_only=True
        )
        return tokenizer


def read_model(
    folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Build the model on the CPU with the decoded weights of a GGUF file.

    Args:
        folder: folder of the file.
        name: name of the file.
        config: see `read_config`.
        dtype: type of the weights in memory; None: bfloat16.

    Raises:
        ModelError: the file is damaged, or lacks weights.
    """
    with foreign_code(f"the weights in {folder / name} cannot be decoded"), silence():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            dtype=dtype or torch.bfloat16,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], {}, folder / name)
    return model
