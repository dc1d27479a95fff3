"""Weight files of a model folder, read into a Transformers model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.models.foreign import foreign_code
from quire.models.matching import check_loaded
from quire.models.packing import PackedLinear
from quire.models.stored import StoredTensor


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model on the CPU with every weight from the folder.

    Args:
        folder: of the model.
        config: of the model, checked by `check_shapes`.
        stored: headers of the folder's weight files, see `read_headers`.
        dtype: of the weights in memory; None keeps what the files and config say.
        trust_remote_code: run the code the folder brings.

    Raises:
        ModelError: weights do not fit the config, some have no value in the files, or some files'
            values have no place.
    """
    with foreign_code(f"the weights in {folder} cannot be loaded"), _silence():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], stored, folder)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters, packed weights and buffers, shared ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = sum(m.packed_bytes for m in model.modules() if isinstance(m, PackedLinear))
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _silence() -> Iterator[None]:
    # No progress bars, and no report of keys over many lines: `check_loaded` says what is wrong.
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
