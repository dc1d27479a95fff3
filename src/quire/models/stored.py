"""The tensors in a folder's weight files, by their headers: names, shapes and types, no values."""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.layout.config import read_json_object

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INTEGERS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file.

    Attributes:
        shape: its lengths.
        dtype: as safetensors names it, for example BF16.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_values(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def is_integer(self) -> bool:
        """Whether its numbers are integers or booleans."""
        return self.dtype in _INTEGERS


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Open every weight file's header, so that damage is named before memory is taken.

    Returns:
        Each stored tensor by its name.

    Raises:
        ModelError: files are missing, cut short, or not in safetensors format.
    """
    found: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        if not path.is_file():
            raise ModelError(f"{folder} has no {path.name}, which {_INDEX} names; fetch it again")
        try:
            found |= _header(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); fetch it again") from error
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    with safe_open(path, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no dict
        return {
            name: StoredTensor(tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


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
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged (it has no 'weight_map'); fetch it again")
    return [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
