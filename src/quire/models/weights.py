"""Weight files of a model folder: found, checked, and read into a Transformers model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.errors import ModelError
from quire.models.packing import PackedLinear

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def check_weights(folder: Path) -> None:
    """Open every weight file's header, so that damage is named before memory is taken.

    Raises:
        ModelError: files are missing, cut short, or not in safetensors format.
    """
    for path in _weight_files(folder):
        if not path.is_file():
            raise ModelError(f"{folder} has no {path.name}, which {_INDEX} names; fetch it again")
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged ({error}); fetch it again") from error


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model on the CPU with every weight from the folder.

    Args:
        folder: checked by `check_weights`.
        config: of the model.
        dtype: of the weights in memory; None keeps what the files and config say.
        trust_remote_code: run the code the folder brings.

    Raises:
        ModelError: weights do not fit the config, or some have no value in the files.
    """
    try:
        with _no_progress_bars():
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
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; they would be random: "
            "fetch the folder again, or check that config.json belongs to it"
        )
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters, packed weights and buffers, shared ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = sum(m.packed_bytes for m in model.modules() if isinstance(m, PackedLinear))
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if next(folder.glob("*.bin"), None) is not None:
        raise ModelError(
            f"{folder} has its weights in .bin files, which can run code when they are opened; "
            "convert them to safetensors (load and save_pretrained with Transformers)"
        )
    raise ModelError(f"{folder} has no weights: expected {_SINGLE} or {_INDEX}")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged ({error}); fetch it again") from error
    return [index.parent / str(name) for name in sorted(names)]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    # A library prints nothing; whoever had bars before gets them back.
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
