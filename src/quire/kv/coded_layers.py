"""Codecs of the pages of each layer, and the measured constants of these codecs."""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kv.store import PageStore
from quire.layout.codecs import CodecSpec
from quire.layout.kv_format import KVFormat
from quire.layout.model import ModelSpec
from quire.layout.pages import PageClass

# Codec constants that were measured for a model, and their files.
#
#     <model>/quire-kv/key.int8_channel.safetensors     layers.0.scale, layers.1.scale, ...
#     <model>/quire-kv/value.int4_equalise_1.safetensors
#
# A file holds one codec of one side (keys or values), so key and value codecs combine freely.

KEY, VALUE = "key", "value"
FOLDER = "quire-kv"

Constants = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MeasuredConstants:
    """Measured codec constants of all layers."""

    # by name for each (layer, KEY or VALUE), in CPU memory
    layers: Mapping[tuple[int, str], Constants]

    def of(self, layer: int, side: str, device: torch.device) -> Constants:
        return {name: numbers.to(device) for name, numbers in self.layers[layer, side].items()}

    @property
    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for layer_side, constants in sorted(self.layers.items()):
            for name, numbers in sorted(constants.items()):
                digest.update(f"{layer_side}{name}{list(numbers.shape)}".encode())
                digest.update(numbers.contiguous().numpy().tobytes())
        return digest.hexdigest()


def sides_of(form: KVFormat) -> dict[str, CodecSpec]:
    """Return the sides (keys, values) whose codecs need measured constants."""
    return {s: c for s, c in ((KEY, form.key), (VALUE, form.value)) if c.constants}


def constants_path(folder: Path, side: str, codec: CodecSpec) -> Path:
    """Return the file of a codec's constants in the model's folder."""
    name = re.sub(r"[^\w.-]+", "_", codec.name)
    return folder / FOLDER / f"{side}.{name}.safetensors"


def write_constants(
    folder: Path, form: KVFormat, measured: MeasuredConstants, notes: Mapping[str, str]
) -> list[Path]:
    """Write a file for each side that has constants; return their paths."""
    written = []
    for side, codec in sides_of(form).items():
        path = constants_path(folder, side, codec)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"layers.{layer}.{name}": numbers.contiguous()
            for (layer, of_side), constants in measured.layers.items()
            for name, numbers in constants.items()
            if of_side == side
        }
        save_file(tensors, path, metadata={"codec": codec.name, "side": side, **notes})
        written.append(path)
    return written


def read_constants(
    folder: Path | None,
    form: KVFormat,
    model: ModelSpec,
    *,
    argument: str = "MODEL",
    output: Sequence[str] = (),
) -> MeasuredConstants:
    """Read the constants that the codecs of a KV format need.

    An error for a missing file has the command that writes it, with the model `argument` and the
    options `output`.
    """
    found: dict[tuple[int, str], Constants] = {}
    for side, codec in sides_of(form).items():
        path = None if folder is None else constants_path(folder, side, codec)
        if path is None or not path.is_file():
            where = "the model has no folder" if path is None else f"there is no {path}"
            command = shlex.join(
                ("quire", "calibrate", argument, "--kv-codec", codec.name, *output)
            )
            raise ConfigError(
                f"KV codec {codec.name!r} needs constants that are measured for each layer of a "
                f"model, and {where}; create them with {command}, or use int8 or int4_outliers, "
                "which need none"
            )
        dims = [heads.key_dim if side == KEY else heads.value_dim for heads in model.heads]
        for layer, constants in _read(path, codec, model, dims).items():
            found[layer, side] = constants
    return MeasuredConstants(found)


def _read(
    path: Path, codec: CodecSpec, model: ModelSpec, dims: Sequence[int]
) -> dict[int, Constants]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; create it with quire calibrate"
        ) from error
    found: dict[int, Constants] = {}
    for layer, spec in enumerate(model.layers):
        if not spec.attends or spec.drafts:
            continue
        own = {name: tensors.get(f"layers.{layer}.{name}") for name in codec.constants}
        missing = sorted(name for name, numbers in own.items() if numbers is None)
        if missing:
            raise ConfigError(
                f"{path} has no {', '.join(missing)} of layer {layer}: it was measured for another "
                "model or codec; run quire calibrate again"
            )
        expected = (model.heads[layer].kv_heads, 1, dims[layer])
        found[layer] = {n: _checked(path, c, expected) for n, c in own.items() if c is not None}
    return found


def _checked(path: Path, numbers: Tensor, expected: tuple[int, int, int]) -> Tensor:
    if numbers.dim() == len(expected) and tuple(numbers.shape) != expected:
        raise ConfigError(
            f"{path} was measured for another model: expected constants {list(expected)}, got "
            f"{list(numbers.shape)}; run quire calibrate again"
        )
    return numbers


class CodedLayers:
    """The codec of each layer, with the layer's measured constants."""

    def __init__(self, store: PageStore, measured: MeasuredConstants | None) -> None:
        self._store, self._measured = store, measured
        self._by_layer: dict[tuple[PageClass, int], CodedPages] = {}

    def of(self, page_class: PageClass, layer: int) -> CodedPages | None:
        """Return the codec of a layer's pages; None if the pages are not quantized."""
        coded = self._store.views(page_class).coded
        if coded is None or self._measured is None:
            return coded
        if (page_class, layer) not in self._by_layer:
            self._by_layer[page_class, layer] = CodedPages(
                self._with_constants(coded.key, layer, KEY),
                self._with_constants(coded.value, layer, VALUE),
            )
        return self._by_layer[page_class, layer]

    def _with_constants(self, coded: CodedPlanes, layer: int, side: str) -> CodedPlanes:
        if self._measured is None or not coded.codec.spec.constants:
            return coded
        constants = self._measured.of(layer, side, self._store.device)
        return replace(coded, codec=replace(coded.codec, constants=constants))
