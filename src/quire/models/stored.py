"""Headers of a folder's weight files, and weights that are stored as GPTQ or AWQ codes.

A header has names, shapes and types of tensors, without values. Codes are decoded while they are
read: Transformers reads them with packages whose kernels need a CUDA device or a compiler. Both
formats are integers in 32-bit words, with a scale and a zero for each output element and group of
inputs:

    weight = (code - zero) * scale

GPTQ  words hold codes of consecutive inputs; a layer may assign inputs to groups in any order
AWQ   words hold codes of 8 outputs, in the order 0 2 4 6 1 3 5 7
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import ModelError, UnsupportedModel
from quire.layout.config import read_json_object, shown
from quire.layout.model import ModelSpec
from quire.models.foreign import foreign_code
from quire.models.support import model_class

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INTEGERS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})
CODES = ".qweight"
WORD_BITS = 32
GPTQ, AWQ = "gptq", "awq"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INSTEAD = (
    "use a checkpoint in bfloat16 or float16 with --weight-codec int8 or int4, a GPTQ checkpoint "
    "of 2, 4 or 8 bits, or an AWQ checkpoint of 4 bits (gemm)"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, for example BF16

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_integer(self) -> bool:
        return self.dtype in _INTEGERS


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read every weight file's header, so that damage is reported before memory is allocated."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
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


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} is damaged (it has no 'weight_map'); fetch it again")
        return [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if next(folder.glob("*.bin"), None) is not None:
        raise ModelError(
            f"{folder} has its weights in .bin files, which can run code when they are opened; "
            "convert them to safetensors (load and save_pretrained with Transformers)"
        )
    raise ModelError(f"{folder} has no weights: expected {_SINGLE} or {_INDEX}")


# Checks that a config describes the stored weights, from the headers of the weight files.
#
# The layers and the number of parameters are compared first, without building a module: for a
# config with a million layers, Transformers would build modules for minutes. The shapes are
# compared with a model on the meta device, which allocates no memory.

# The first number of a tensor's name is its layer index, after one of these words.
_LAYER = re.compile(r"^((?:[A-Za-z_]\w*\.)*?(?:layers|layer|blocks|block|h))\.(\d+)\.")
_CONFIG_FITS = "check that config.json belongs to these weights"
_MAX_TIMES_STORED = 2  # a spec may count a tied matrix twice and omit a few vectors


def check_shapes(
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    *,
    trust_remote_code: bool = False,
) -> None:
    """Compare a config with the headers of the weight files."""
    spec = ModelSpec.from_config(config.to_dict())
    known = model_class(config)
    if known is not None:
        _check_layers(spec.decoder_layers, stored, known)
    elif spec.decoder_layers > len(stored):
        raise _too_many_layers(spec.decoder_layers, f"{len(stored)} tensors")
    if getattr(config, "quantization_config", None):
        return  # packed weights have shapes of their own
    if known is not None:
        _check_parameters(spec, stored)
    model = model_without_memory(config, trust_remote_code=trust_remote_code)
    for name, parameter in nn.Module.named_parameters(model):
        found = next((stored[n] for n in spellings(model, name) if n in stored), None)
        # equal counts in another order are left to the conversions of Transformers
        if found is not None and found.num_values != parameter.numel():
            raise ModelError(
                f"the weights have {name} of shape {list(found.shape)}, but config.json requires "
                f"{list(parameter.shape)}{_fields_of(config, parameter, found)}; {_CONFIG_FITS}"
            )


def layer_list(name: str) -> str | None:
    """The list of layers that a tensor is in, as model.layers; None for tensors of no layer."""
    match = _LAYER.match(name)
    return None if match is None else match[1]


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether a model class declares a stored tensor as ignorable."""
    return any(re.search(pattern, name) for pattern in patterns)


def _stored_layers(names: Iterable[str]) -> set[int]:
    found: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_LAYER.match, names)):
        found[match[1]].add(int(match[2]))
    return max(found.values(), key=len, default=set())


def _check_layers(
    num_layers: int, stored: Mapping[str, StoredTensor], known: type[PreTrainedModel]
) -> None:
    layers = _stored_layers(stored)
    if not layers:
        return
    missing = set(range(num_layers)) - layers
    if missing:
        raise _too_many_layers(num_layers, f"no weights of layer {min(missing)}")
    ignored: Iterable[str] = known._keys_to_ignore_on_load_unexpected or ()
    surplus = _stored_layers(name for name in stored if not is_ignored(name, ignored))
    surplus -= set(range(num_layers))
    if surplus:
        raise ModelError(
            f"config.json: 'num_hidden_layers' is {num_layers}, but the weights contain "
            f"{len(layers)} layers, of which {len(surplus)} would be ignored; set it to "
            f"{max(surplus) + 1}, or {_CONFIG_FITS}"
        )


def _too_many_layers(num_layers: int, found: str) -> ModelError:
    return ModelError(
        f"config.json: 'num_hidden_layers' is {num_layers}, and the weight files have {found}; "
        f"{_CONFIG_FITS}"
    )


def _check_parameters(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> None:
    num_stored = sum(tensor.num_values for tensor in stored.values())
    if spec.num_parameters > _MAX_TIMES_STORED * num_stored:
        raise ModelError(
            f"config.json describes {spec.num_parameters:,} parameters, but the weight files have "
            f"{num_stored:,} (embedding {spec.vocab_size} x {spec.hidden_size}, MLP "
            f"{spec.intermediate_size}, {spec.num_heads} and {spec.num_kv_heads} heads of "
            f"{spec.head_dim}); {_CONFIG_FITS}"
        )


def model_without_memory(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of a config on the meta device, which allocates no memory."""
    with foreign_code("no model can be built from config.json"), torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=trust_remote_code
            )
        except KeyError as error:
            _refuse_name(config, error.args[0] if error.args else None)
            raise
    return model


def _refuse_name(config: PreTrainedConfig, name: object) -> None:
    # Transformers looks up names of a config in tables; the KeyError contains only the name.
    field = next((field for field, value in _named_values(config) if value == name), None)
    if field is None or not isinstance(name, str):
        return
    activations = ACT2FN if "act" in field else ()
    known = {"default", *ROPE_INIT_FUNCTIONS} if field == "rope_type" else activations
    choices = f", expected one of {', '.join(sorted(known))}" if known else ""
    raise ModelError(
        f"config.json: {field!r} is {shown(name)}, which Transformers does not know{choices}"
    )


def _named_values(config: PreTrainedConfig) -> Iterator[tuple[str, object]]:
    for field, value in config.to_dict().items():
        yield field, value
        if isinstance(value, dict):
            yield from value.items()


def spellings(model: PreTrainedModel, name: str) -> tuple[str, str, str]:
    """A name in a weight file or a model: it may have or lack the prefix of the base model."""
    prefix = f"{model.base_model_prefix}."
    return name, name.removeprefix(prefix), prefix + name


def _fields_of(config: PreTrainedConfig, parameter: nn.Parameter, found: StoredTensor) -> str:
    lengths = set(parameter.shape) - set(found.shape)
    fields = [
        f"{field}={value}"
        for field, value in config.to_dict().items()
        if isinstance(value, int) and value in lengths
    ]
    return f" ({', '.join(fields)})" if fields else ""


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The format of a checkpoint's coded linear layers."""

    method: str  # gptq or awq
    bits: int  # of a code
    zero_offset: int  # number added to stored zeros

    def headers(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
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
