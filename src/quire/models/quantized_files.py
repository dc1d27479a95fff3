"""Checkpoints whose linear layers are stored as GPTQ or AWQ codes, decoded while they are read.

Transformers reads them with packages whose kernels need a CUDA device or a compiler. Both formats
are integers in 32-bit words, with a scale and a zero for each output element and group of inputs:

    weight = (code - zero) * scale

GPTQ  words hold codes of consecutive inputs; a layer may assign inputs to groups in any order
AWQ   words hold codes of 8 outputs, in the order 0 2 4 6 1 3 5 7
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from quire.errors import ModelError, UnsupportedModel
from quire.models.stored import StoredTensor, weight_files

CODES = ".qweight"
WORD_BITS = 32
GPTQ, AWQ = "gptq", "awq"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INSTEAD = (
    "use a checkpoint in bfloat16 or float16 with --weight-codec int8 or int4, a GPTQ checkpoint "
    "of 2, 4 or 8 bits, or an AWQ checkpoint of 4 bits (gemm)"
)


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The format of a checkpoint's coded linear layers."""

    method: str  # gptq or awq
    bits: int  # of a code
    zero_offset: int  # number added to stored zeros

    def headers(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The headers of the decoded tensors."""
        found = {}
        for name, parts in _layers(stored):
            if parts is None:
                found[name] = stored[name]
                continue
            words, scales = stored[parts[0]].shape, stored[parts[2]].shape
            inner = words[0] * (WORD_BITS // self.bits if self.method == GPTQ else 1)
            found[name] = StoredTensor((scales[-1], inner), stored[parts[2]].dtype)
        return found

    def read(
        self, folder: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Read all tensors, and decode the coded layers to a type, one at a time."""
        files: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
        read = _Reader(files)
        tensors = {}
        for name, parts in _layers(stored):
            if parts is None:
                tensors[name] = read(name)
            else:
                tensors[name] = self._decoded([read(part) for part in parts]).to(dtype)
        return tensors

    def _decoded(self, parts: list[Tensor]) -> Float[Tensor, "outer inner"]:
        words, zero_words, scales, *groups = parts
        decode = _gptq_codes if self.method == GPTQ else _awq_codes
        codes, zeros = decode(words, zero_words, self.bits)
        inner = len(codes)
        group = groups[0].long() if groups else torch.arange(inner) * len(scales) // inner
        shifted = codes - (zeros + self.zero_offset)[group]
        return (shifted.float() * scales.float()[group]).T.contiguous()


class _Reader:
    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __call__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor


def coded_layers(config: PreTrainedConfig) -> QuantizedLayers | None:
    """The format of a checkpoint that Quire decodes; None for any other checkpoint."""
    options = _options(config)
    read: dict[Any, Callable[[Mapping[str, Any]], QuantizedLayers]] = {GPTQ: _gptq, AWQ: _awq}
    method = options.get("quant_method")
    return read[method](options) if method in read else None


def refuse_codec(config: PreTrainedConfig, codec: str) -> None:
    """Refuse to quantize the weights of a quantized checkpoint that Quire does not decode."""
    options = _options(config)
    if options and codec != "auto" and coded_layers(config) is None:
        raise UnsupportedModel(
            f"weight_codec={codec} is not possible: the checkpoint is quantized already "
            f"({options.get('quant_method')}); leave out the codec, or {_INSTEAD}"
        )


@contextmanager
def with_alternative(config: PreTrainedConfig) -> Iterator[None]:
    """Name checkpoints to use instead, if Transformers cannot load a quantized one."""
    method = _options(config).get("quant_method")
    try:
        yield
    except ModelError as error:
        if method is None:
            raise
        raise ModelError(
            f"{error}; the checkpoint is quantized ({method}) and loaded by Transformers: meet its "
            f"requirement, or {_INSTEAD}"
        ) from error


def _options(config: PreTrainedConfig) -> Mapping[str, Any]:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    options: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return options


def _gptq(options: Mapping[str, Any]) -> QuantizedLayers:
    bits, form = options.get("bits"), options.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"GPTQ weights with bits={bits} and checkpoint_format={form} cannot be decoded "
            f"(2, 4 or 8 bits, gptq or gptq_v2); {_INSTEAD}"
        )
    return QuantizedLayers(GPTQ, bits, zero_offset=1 if form == "gptq" else 0)


def _awq(options: Mapping[str, Any]) -> QuantizedLayers:
    bits, form = options.get("bits"), str(options.get("version") or "gemm").lower()
    if bits != 4 or form != "gemm":
        raise UnsupportedModel(
            f"AWQ weights with bits={bits} and version={form} cannot be decoded (4 bits, gemm); "
            f"{_INSTEAD}"
        )
    return QuantizedLayers(AWQ, bits, zero_offset=0)


def _layers(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, list[str] | None]]:
    """Names of decoded tensors with the parts of their codes; None for tensors without codes."""
    coded = {name.removesuffix(CODES) for name in stored if name.endswith(CODES)}
    for name in stored:
        layer, _, part = name.rpartition(".")
        if layer not in coded or part not in ("qweight", "qzeros", "scales", "g_idx"):
            yield name, None
        elif part == "qweight":
            parts = [f"{layer}.{part}" for part in ("qweight", "qzeros", "scales")]
            missing = [part for part in parts if part not in stored]
            if missing:
                raise UnsupportedModel(f"the checkpoint has no {missing[0]}; fetch it again")
            index = f"{layer}.g_idx"
            yield f"{layer}.weight", [*parts, *([index] if index in stored else [])]


def _unpacked(words: Int[Tensor, "row word"], bits: int) -> Int[Tensor, "row word code"]:
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words[:, :, None] >> shifts) & ((1 << bits) - 1)


def _gptq_codes(words: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes = _unpacked(words.T, bits).flatten(1).T  # words are over inputs
    return codes, _unpacked(zeros, bits).flatten(1)


def _awq_codes(words: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    order = torch.tensor(_AWQ_ORDER).argsort()
    codes, zero_codes = (_unpacked(each, bits)[:, :, order].flatten(1) for each in (words, zeros))
    return codes, zero_codes
