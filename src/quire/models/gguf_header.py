"""The header of a GGUF file: metadata and the table of tensors, read once and without copies.

The reader of the package gguf makes several NumPy arrays for each string of a vocabulary: 2 s for
49 thousand tokens, four times in one load by Transformers. This one keeps the place of an array and
decodes it when it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import modeling_gguf_pytorch_utils

from quire.errors import ModelError, UnsupportedModel

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}  # type of a value -> its format in `struct`
_ALIGNMENT = 32  # of tensors, if the file has no other
_PATCHING = threading.RLock()


@dataclass(frozen=True, slots=True)
class _Array:
    """Place of an array."""

    kind: int  # of its elements
    count: int
    start: int  # first byte


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file."""

    name: str  # in llama.cpp
    shape: tuple[int, ...]  # in the order of torch; the last dimension is contiguous
    kind: int  # type, as numbered in ggml
    start: int  # first byte


class GgufHeader:
    """Metadata and tensors of a file.

    Attributes:
        values: numbers and texts by key; arrays by `array`.
        tensors: in the order of the file.

    Raises:
        ModelError: the file is no GGUF file, of an unknown version, or shorter than its tensors.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 24
        self._kinds: dict[str, int] = {}
        self._arrays: dict[str, _Array] = {}
        self.values: dict[str, Any] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{file} is damaged: its header cannot be read") from error
        end = max((t.start + _byte_shape(t)[1] for t in self.tensors), default=0)
        if end > len(self._bytes):
            raise ModelError(
                f"{self.file} is incomplete: its tensors end at byte {end:,}, and it has "
                f"{len(self._bytes):,} B; copy or download it again"
            )

    def _read(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.file} is not a GGUF file: it does not begin with GGUF")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in (2, 3):
            raise ModelError(
                f"{self.file} has version {version} of the format; convert it to version 3 with a "
                "current llama.cpp"
            )
        for _ in range(num_values):
            name = self._text()
            kind = self._kinds[name] = self._number("I")
            if kind == _ARRAY:
                self._arrays[name] = self._skip_array()
            else:
                text = kind == _STRING
                self.values[name] = self._text() if text else self._number(_NUMBERS[kind])
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", _ALIGNMENT)
        first = -(-self._position // alignment) * alignment
        self.tensors = tuple(
            GgufTensor(name, shape, kind, first + offset) for name, shape, kind, offset in entries
        )

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._position)
        self._position += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        text = self._bytes[self._position : self._position + length]
        self._position += length
        return text.decode()

    def _skip_array(self) -> _Array:
        kind, count = self._number("I"), self._number("Q")
        found = _Array(kind, count, self._position)
        if kind == _STRING:
            position, read, data = self._position, struct.Struct("<Q").unpack_from, self._bytes
            for _ in range(count):
                position += 8 + read(data, position)[0]
            self._position = position
        else:
            self._position += count * struct.calcsize(_NUMBERS[kind])
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def array(self, name: str) -> list[Any]:
        array = self._arrays[name]
        if array.kind != _STRING:
            form = f"<{array.count}{_NUMBERS[array.kind]}"
            return list(struct.unpack_from(form, self._bytes, array.start))
        found, position, data = [], array.start, self._bytes
        read = struct.Struct("<Q").unpack_from
        for _ in range(array.count):
            first = position + 8
            position = first + read(data, position)[0]
            found.append(data[first:position].decode())
        return found

    def data(self, tensor: GgufTensor) -> np.ndarray:
        """The bytes of a tensor in the file, as the package gguf shapes them."""
        (dtype, shape), num_bytes = _byte_shape(tensor)
        data = np.frombuffer(self._bytes, np.uint8, num_bytes, tensor.start)
        shaped: np.ndarray = data.view(dtype).reshape(shape)
        return shaped

    def release_pages(self) -> None:
        """Remove the pages of the file from resident memory; the next access reads the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def fields(self) -> dict[str, Any]:
        """Metadata in the form of `gguf.GGUFReader.fields`, but with parsed parts."""
        return {
            name: _field(self.array(name)) if kind == _ARRAY else _field([self.values[name]])
            for name, kind in self._kinds.items()
        }


def _field(parts: list[Any]) -> Any:
    return SimpleNamespace(parts=parts, data=range(len(parts)), types=None)


def _byte_shape(tensor: GgufTensor) -> tuple[tuple[Any, tuple[int, ...]], int]:
    """NumPy type and shape of a tensor's bytes, and their number."""
    import gguf  # takes 50 ms

    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise UnsupportedModel(
            f"the tensor {tensor.name} has type {tensor.kind}, which the package gguf does not "
            "know; install a newer one, or use a file in F16, BF16, Q8_0, Q6_K or Q4_K_M"
        ) from None
    dtype = _PLAIN.get(kind.name, np.dtype(np.uint8))
    shape = tensor.shape
    if kind.name not in _PLAIN:
        shape = tuple(gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind))
    return (dtype, shape), dtype.itemsize * int(np.prod(shape, dtype=np.int64))


_PLAIN = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
}


def read_header(file: Path) -> GgufHeader:
    """The header of a file; the last one is kept for the next steps of a load."""
    status = file.stat()
    return _read_header(file.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _read_header(file: Path, _modified_ns: int, _num_bytes: int) -> GgufHeader:
    return GgufHeader(file)


@contextmanager
def read_once() -> Iterator[None]:
    """Transformers reads the headers of GGUF files by `read_header` in this block.

    It also builds the table of an architecture's tensor names once, instead of once for each module
    of the model, and shows no progress bar, which would ignore the setting of the others.
    """
    import gguf

    transformers: Any = modeling_gguf_pytorch_utils
    replaced: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", _reader),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (transformers, "_gguf_parse_value", lambda part, _: part),
        (transformers, "tqdm", lambda tensors, **_: tensors),
    ]
    with _PATCHING:
        found = [getattr(module, name) for module, name, _ in replaced]
        try:
            for module, name, value in replaced:
                setattr(module, name, value)
            yield
        finally:
            for (module, name, _), value in zip(replaced, found, strict=True):
                setattr(module, name, value)


def _reader(file: str | Path) -> Any:
    import gguf

    header = read_header(Path(file))
    tensors = [
        SimpleNamespace(
            name=tensor.name,
            data=header.data(tensor),
            tensor_type=gguf.GGMLQuantizationType(tensor.kind),
        )
        for tensor in header.tensors
    ]
    return SimpleNamespace(fields=header.fields(), tensors=tensors)
