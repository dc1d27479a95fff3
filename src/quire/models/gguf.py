"""GGUF files: Transformers reads the config and the tokenizer, and decodes the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    modeling_gguf_pytorch_utils,
)

from quire.errors import ModelError
from quire.layout.extras import require_extra
from quire.models.foreign import foreign_code
from quire.models.gguf_metadata import GgufMetadata
from quire.models.weights import check_loaded, silence

SUFFIX = ".gguf"
DTYPE = torch.bfloat16
"""Type of the decoded weights in memory, unless another one is requested."""


def find_file(path: str | Path) -> Path | None:
    """The GGUF file at a path; None if the path names no GGUF file.

    Raises:
        ModelError: there is no such file.
    """
    if not str(path).endswith(SUFFIX):
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelError(
            f"expected a GGUF file, got {str(path)!r}: there is no such file; GGUF files are not "
            "downloaded from the hub"
        )
    return file


def refuse_folder(folder: Path) -> None:
    """Refuse a folder without config.json that has GGUF files.

    Raises:
        ModelError: names one of the files.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if files and not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} has no config.json, but GGUF files: pass one of them, as in {files[0]}"
        )


def read_config(file: Path) -> tuple[PreTrainedConfig, GgufMetadata]:
    """Read the config of a GGUF file, with its RoPE scaling.

    Raises:
        ConfigError: a package that Transformers needs is missing.
        ModelError: the file cannot be read, or is a part of a model.
        UnsupportedModel: an unknown RoPE scaling, or tensors that cannot be decoded.
    """
    require_extra("gguf", f"{file.name}: a GGUF file, which Transformers decodes,")
    with foreign_code(f"{file} cannot be read"):
        metadata = GgufMetadata.read(file)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        metadata.check()
        metadata.set_rope(config)
    config.dtype = DTYPE
    return config, metadata


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
        dtype: type of the weights in memory; None: `DTYPE`.

    Raises:
        ModelError: the file is damaged, or lacks weights.
    """
    undecodable = foreign_code(f"the weights in {folder / name} cannot be decoded")
    with undecodable, silence(), _without_progress_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            dtype=dtype or DTYPE,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], {}, folder / name)
    return model


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the bar of the decoding: it ignores the setting of Transformers' progress bars."""
    module: Any = modeling_gguf_pytorch_utils
    bar = module.tqdm
    module.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        module.tqdm = bar
