"""GGUF files: Transformers reads the config and the tokenizer, and decodes the weights.

Metadata that Transformers ignores is read here: RoPE scaling, parts, and types of tensors.
llama.cpp stores the scaling of a model as a type with numbers (linear, yarn), as one divisor for
each frequency (`rope_freqs`, for llama3 scaling), or as two sets of divisors (longrope). A model
without its scaling computes other positions, and no error shows it.

The reader of the package gguf makes several NumPy arrays for each string of a vocabulary: 2 s for
49 thousand tokens, four times in one load by Transformers. `read_header` keeps the place of an
array and decodes it when it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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

from quire.errors import ModelError, UnsupportedModel
from quire.models.foreign import foreign_code
from quire.models.rope import LONGROPE
from quire.models.source import GGUF
from quire.models.weights import check_loaded, silence

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_SCALED_LAYERS = "full_attention"
_NO_TOKENIZER = "no_vocab"


_NUMBERS |= {12: "d"}  # type of a value -> its format in `struct`
_ALIGNMENT = 32  # of tensors, if the file has no other
_PATCHING = threading.RLock()


@dataclass(frozen=True, slots=True)
class _Array:
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


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata of a GGUF file."""

    file: Path
    values: Mapping[str, Any]
    divisors: Mapping[str, list[float]]  # of the rotary frequencies by the name of their tensor
    undecodable: str  # first type of tensors that the package gguf cannot decode

    @classmethod
    def read(cls, file: Path) -> "GgufMetadata":
        header = read_header(file)
        return cls(
            file,
            header.values,
            {
                tensor.name: header.data(tensor).astype(np.float64).ravel().tolist()
                for tensor in header.tensors
                if tensor.name in (_DIVISORS, _SHORT, _LONG)
            },
            _undecodable(header),
        )

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.values.get("tokenizer.ggml.model", _NO_TOKENIZER) != _NO_TOKENIZER)

    @property
    def end_token_ids(self) -> list[int]:
        return [int(self.values[key]) for key in _END_TOKENS if key in self.values]

    def check(self) -> None:
        """Refuse files that do not hold a whole model in types that can be decoded."""
        parts = int(self.values.get("split.count", 1))
        if parts > 1:
            raise ModelError(
                f"{self.file} is one of {parts} parts of a model; merge them with llama.cpp's "
                "llama-gguf-split --merge, and pass the merged file"
            )
        if self.undecodable:
            raise UnsupportedModel(
                f"{self.file} has tensors of type {self.undecodable}, which the package gguf "
                "cannot decode; use a file in F16, BF16, Q8_0, Q6_K or Q4_K_M"
            )

    def set_rope(self, config: PreTrainedConfig) -> None:
        """Set the file's RoPE scaling in a config, unless Transformers read it."""
        parameters = getattr(config, "rope_parameters", None) or {}
        scaled = parameters.get(_SCALED_LAYERS, parameters)  # one set for each kind of layer
        if scaled.get("rope_type", "default") != "default" or "rope_theta" not in scaled:
            return
        found = scaled | self._scaling(config.max_position_embeddings)
        config.rope_parameters = (
            found if scaled is parameters else {**parameters, _SCALED_LAYERS: found}
        )

    def _scaling(self, max_positions: int) -> dict[str, Any]:
        kind = str(self._rope("scaling.type", ""))
        factor = self._rope("scaling.factor", self._rope("scale_linear", 0.0)) or 1.0
        original = self._rope("scaling.original_context_length", max_positions)
        if _DIVISORS in self.divisors:
            return _divided(self.divisors[_DIVISORS], self.divisors[_DIVISORS], max_positions, 1.0)
        if _LONG in self.divisors:
            attention = self._rope("scaling.attn_factor", 1.0)
            return _divided(self.divisors[_SHORT], self.divisors[_LONG], original, attention)
        if kind in ("", "linear"):
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
        if kind == "yarn":
            return self._yarn(factor, original)
        if kind != "none":
            raise UnsupportedModel(
                f"{self.file} has RoPE scaling {kind!r}, which cannot be read from GGUF files; use "
                "the model's folder in Hugging Face format"
            )
        return {}

    def _yarn(self, factor: float, original: int) -> dict[str, Any]:
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        attention = self._rope("scaling.attn_factor", self._rope("scaling.yarn_attn_factor", 1.0))
        if attention != 1.0:  # a factor on the default of YaRN
            found["attention_factor"] = attention * (0.1 * float(np.log(factor)) + 1.0)
        for name, key in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
            if (value := self._rope(f"scaling.{key}", None)) is not None:
                found[name] = value
        return found

    def _rope(self, name: str, default: Any) -> Any:
        architecture = self.values.get("general.architecture", "")
        return self.values.get(f"{architecture}.rope.{name}", default)


_END_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


def _divided(
    short: list[float], long: list[float], original: int, attention: float
) -> dict[str, Any]:
    return {
        "rope_type": LONGROPE,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _undecodable(header: GgufHeader) -> str:
    """The first type of tensors that the package gguf cannot decode, tried on a row; "" if none."""
    import gguf

    of_types = {tensor.kind: tensor for tensor in reversed(header.tensors)}
    for number, tensor in sorted(of_types.items()):
        kind = gguf.GGMLQuantizationType(number)
        try:
            gguf.dequantize(header.data(tensor)[:1], kind)
        except NotImplementedError:
            return str(kind.name)
    return ""


DTYPE = torch.bfloat16
"""Type of the decoded weights in memory, unless another one is requested."""


def refuse_folder(folder: Path) -> None:
    """Refuse a folder without config.json that has GGUF files."""
    files = sorted(folder.glob(f"*{GGUF}"))
    if files and not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} has no config.json, but GGUF files: pass one of them, as in {files[0]}"
        )


def read_config(file: Path) -> tuple[PreTrainedConfig, GgufMetadata]:
    """Read the config of a GGUF file, with its RoPE scaling."""
    with foreign_code(f"{file} cannot be read"), read_once():
        metadata = GgufMetadata.read(file)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        metadata.check()
        metadata.set_rope(config)
    config.dtype = DTYPE
    return config, metadata


def load_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file."""
    with foreign_code(f"the tokenizer in {folder / name} cannot be read"), silence(), read_once():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, gguf_file=name, local_files_only=True
        )
        return tokenizer


def read_model(
    folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Build the model on the CPU with the decoded weights of a GGUF file."""
    undecodable = foreign_code(f"the weights in {folder / name} cannot be decoded")
    with undecodable, silence(), read_once():
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
    read_header(folder / name).release_pages()
    return model
